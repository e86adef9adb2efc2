# Everything runs in .venv, made on first use. `make help` lists the targets.
PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help demo test system cuda lint types imports doctest unit site coverage dist hooks golden rivals bench uplot size clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(VENV)/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(VENV)/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,svhn,hf,flower]'
	@touch $@

demo: $(VENV)/core ## FedAvg forgets, three other methods less: 40 clients with handwritten digits, a table and report.html (2 minutes)
	$(BIN)/undrift sweep demo --out runs/demo

test: lint types imports doctest site unit ## lint, types, import rule, doctests, the site with its notebooks, and tests
	@$(BIN)/python tests/cuda_record.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

doctest: $(INSTALLED)
	$(BIN)/pytest -q --doctest-modules --doctest-ignore-import-errors undrift

unit: $(INSTALLED)
	$(BIN)/pytest -q -n 2 -m "not system" --durations=8

site: $(INSTALLED) ## run the notebooks and build the documentation's site in build/site; a warning is an error
	$(BIN)/python docs/site/notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/undrift results results --out build/site/results

coverage: $(INSTALLED) ## which lines the tests run (at least 90 % without a GPU); writes the badges of the README
	@mkdir -p build/coverage
	$(BIN)/pytest -q -n 2 -m "not system" --cov --cov-report=json --cov-report=term
	$(BIN)/python docs/badges/badges.py

dist: $(INSTALLED) ## the wheel and the sdist in dist/, checked
	rm -rf dist && $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

hooks: $(INSTALLED) ## lint, format, types and the import rule before every commit
	$(BIN)/pre-commit install

system: $(INSTALLED) ## slow checks of the whole system (kills, damages, fuzzing, real federations); writes docs/reliability.md; SEED=n draws others
	@rm -f build/reliability.json
	$(BIN)/pytest -q -m system --minutes 75 --seed $(SEED) -rs --durations=20; code=$$?; $(BIN)/python tests/reliability.py; exit $$code

cuda: $(INSTALLED) ## the tests that need a GPU; writes benchmarks/results/cuda-tests.json
	$(BIN)/pytest -q -m cuda

golden: $(INSTALLED) ## write tests/golden anew: only for a deliberate change of results
	UNDRIFT_WRITE_GOLDEN=1 $(BIN)/pytest -q tests/algorithms/test_all_algorithms.py -k golden

rivals: $(INSTALLED) ## fluke, APPFL, NVFlare, pfl and FedLab for the benchmarks and the audit, each in a virtual environment in .rivals
	@$(BIN)/python benchmarks/rivals.py | while read name package; do \
		$(PYTHON) -m venv .rivals/$$name && .rivals/$$name/bin/pip install --quiet --disable-pip-version-check -e . $$package; done

bench: $(INSTALLED) ## speed beside a plain loop and other frameworks; memory and speed with very many clients
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/scale.py

UPLOT := 1.6.32
uplot: ## fetch the charts of the report anew (npm); raise UPLOT here and in undrift/report/page.py for another version
	@folder=$$(mktemp -d) && cd $$folder && npm pack --silent uplot@$(UPLOT) && tar xzf uplot-$(UPLOT).tgz && cd - && \
	cp $$folder/package/dist/uPlot.iife.min.js undrift/report/web/uplot.min.js && cp $$folder/package/dist/uPlot.min.css undrift/report/web/uplot.min.css && \
	cp $$folder/package/LICENSE undrift/report/web/uplot.LICENSE && rm -r $$folder

size: ## lines of each file
	@git ls-files 'undrift/*.py' | xargs wc -l | sort -rn | head -25

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .rivals .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
