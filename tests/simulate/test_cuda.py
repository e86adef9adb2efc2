"""Whole runs on a GPU give the same results as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from undrift.core.names import names
from undrift.jobs.folder import RunFolder
from undrift.kernels import devices, launch
from undrift.kernels.chain import dense_step

pytestmark = pytest.mark.cuda
QUICK = {"clients": 20, "cohort": 6, "batch": 16, "rounds": 4, "eval_every": 2, "execution": "stacked"}


def run(device: str, **settings: Any) -> undrift.Result:
    return undrift.run(QUICK | {"device": device} | settings)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
@pytest.mark.parametrize("model", ["mlp", "gradma-nn"])
def test_cuda_agrees_with_the_cpu(name: str, model: str, replay: bool) -> None:
    """Float64, epochs (unequal steps), BatchNorm: the streams are integer arithmetic, so cohorts and batches are the same."""
    settings = {"algorithm": name, "model": model, "dtype": "float64", "epochs": 1.0}
    here, there = run("cpu", **settings), run("cuda", replay=replay, **settings)
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-9, atol=1e-9)
    assert [r["bytes_up"] for r in here.records] == [r["bytes_up"] for r in there.records]


def test_dropout_and_convolutions_agree_with_the_cpu() -> None:
    import numpy as np

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 28, 28, 1), dtype=np.uint8)
    labels = random.integers(0, 10, 200)
    data = undrift.Dataset("random", images, labels, images[:20], labels[:20], 10, (0.5,), (0.5,), crop=2, flip=True)
    here, there = (
        undrift.run(QUICK | {"device": d}, data=data, model="gradma-lenet5", dtype="float64", partition="iid", rounds=2)
        for d in ("cpu", "cuda")
    )
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
def test_deterministic_runs_repeat_and_resume_bit_for_bit(name: str, replay: bool, tmp_path: Path) -> None:
    how = {"algorithm": name, "deterministic": True, "replay": replay}
    once, twice = (run("cuda", **how) for _ in range(2))
    cut = undrift.run(QUICK | {"device": "cuda", "rounds": 2}, **how, out=tmp_path / "r")
    assert len(cut.records) == 2
    resumed = undrift.run(out=tmp_path / "r", resume=True, rounds=4)
    for n, tensor in once.model.items():
        assert torch.equal(twice.model[n], tensor)
        assert torch.equal(resumed.model[n], tensor)


def test_chunks_shrink_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import here

    whole = run("cuda", algorithm="scaffold", dtype="float64")
    real = here.train
    calls: list[int] = []

    def short(*arguments: Any) -> Any:
        answers = real(*arguments)
        calls.append(len(answers.loss))
        if len(answers.loss) > 3:
            raise torch.cuda.OutOfMemoryError("pretended")
        return answers

    monkeypatch.setattr(here, "train", short)
    split = run("cuda", algorithm="scaffold", dtype="float64", chunk=6, replay=False)
    assert calls[:3] == [6, 3, 3]
    assert split.records[-1]["gradients"] == whole.records[-1]["gradients"]
    for n, tensor in whole.model.items():
        torch.testing.assert_close(split.model[n], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
def test_packed_runs_agree_with_the_cpu(name: str, replay: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from undrift.jobs import packs
    from undrift.jobs.config import from_mapping

    runs = [
        {"algorithm": name, "dtype": "float64", "seed": seed, "set": {"lr": lr}, "replay": replay}
        for seed, lr in ((0, 0.1), (1, 0.05), (2, 0.2))
    ]
    folders = [tmp_path / str(each["seed"]) for each in runs]
    configs = [from_mapping(QUICK | {"device": "cuda"} | each) for each in runs]
    assert packs.cost(configs[0], 1).most >= 3 and len({packs.kind(c, RunFolder(tmp_path)) for c in configs}) == 1
    packs.run_packed(configs, folders, [lambda record, rounds: None] * 3)
    for each, folder in zip(runs, folders, strict=True):
        found = load_file(folder / "model.safetensors")
        for n, tensor in run("cpu", **each).model.items():
            torch.testing.assert_close(found[n], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("name", ["fedavg", "gradma-s", "gradma", "scaffold"])
def test_compiled_rounds_agree_with_others(name: str) -> None:
    how = {"algorithm": name, "rounds": 70, "eval_every": 100, "precision": "fp32"}
    plain, compiled = run("cuda", **how, replay=False), run("cuda", **how, compile="on")
    for n, tensor in plain.model.items():
        torch.testing.assert_close(compiled.model[n], tensor, rtol=5e-3, atol=5e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("how", [{"replay": False}, {"replay": True}, {"replay": True, "compile": "on"}])
@pytest.mark.parametrize("plan", [{"steps": 3}, {"epochs": 1.0, "partition": "dirichlet:0.1"}])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_a_cohort_that_fills_the_cache_agrees_with_a_small_one(
    name: str, plan: dict[str, Any], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"algorithm": name, "model": "mlp"} | plan | how
    small, steps = run("cuda", **settings), []
    monkeypatch.setattr(devices, "cache", lambda device: 0)
    ((when, made),) = dense_step.forms
    forms = [(when, lambda *given: steps.append(len(given[0])) or made(*given))]
    monkeypatch.setattr(dense_step, "forms", forms)
    large = run("cuda", **settings)
    assert bool(steps) == (name == "fedavg")  # others ask for a gradient, on the same turned inputs
    assert large.records[-1]["gradients"] == small.records[-1]["gradients"]
    for n, tensor in small.model.items():
        torch.testing.assert_close(large.model[n], tensor, rtol=1e-3, atol=1e-4)


def test_packed_runs_that_fill_the_cache_agree_with_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from undrift.jobs import packs
    from undrift.jobs.config import from_mapping

    runs = [{"model": "mlp", "seed": seed, "set": {"lr": lr}} for seed, lr in ((0, 0.1), (1, 0.05), (2, 0.2))]
    alone = [run("cuda", **each).model for each in runs]
    monkeypatch.setattr(devices, "cache", lambda device: 0)
    configs = [from_mapping(QUICK | {"device": "cuda"} | each) for each in runs]
    folders = [tmp_path / str(each["seed"]) for each in runs]
    packs.run_packed(configs, folders, [lambda record, rounds: None] * 3)
    for folder, model in zip(folders, alone, strict=True):
        found = load_file(folder / "model.safetensors")
        for n, tensor in model.items():
            torch.testing.assert_close(found[n], tensor, rtol=1e-3, atol=1e-4)


def test_padding_keeps_the_layout_of_turned_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import work

    monkeypatch.setattr(devices, "cache", lambda device: 0)
    made, seen = work.mini_batch, []

    def watched(*given: Any) -> Any:
        batch = made(*given)
        seen.append((batch.real is not None, batch.inputs.flatten(2).mT.is_contiguous()))
        return batch

    monkeypatch.setattr(work, "mini_batch", watched)
    run("cuda", model="mlp", epochs=1.0, partition="dirichlet:0.1", replay=False)
    assert any(padded for padded, _ in seen) and all(turned for _, turned in seen)


@pytest.mark.parametrize("how", [{"execution": "stacked"}, {"execution": "auto"}])
def test_the_kernels_of_a_run_are_rehearsed(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that take pictures; and a loss that ends the program where its input is no probability never sees one."""
    import numpy as np

    asked: set[str] = set()
    ask = launch.Rehearsal.ask

    def watched(self: launch.Rehearsal, kernel: Any, *given: Any) -> None:
        asked.add(kernel.fn.__name__)
        ask(self, kernel, *given)

    monkeypatch.setattr(launch.Rehearsal, "ask", watched)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 12, 12, 3), dtype=np.uint8)
    marks = random.integers(0, 2, (200, 4)).astype(np.float32)
    data = undrift.Dataset("random", images, marks, images[:20], marks[:20], 4, (0.5,) * 3, (0.5,) * 3)
    layers = torch.nn.Conv2d(3, 6, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(384, 4), torch.nn.Sigmoid()
    settings = QUICK | how | {"algorithm": "gradma", "device": "cuda", "partition": "iid", "deterministic": True}
    result = undrift.run(settings, data=data, model=torch.nn.Sequential(*layers), loss=torch.nn.BCELoss())
    assert {"_forward", "_filters", "_products", "_mem_red", "_pivots"} <= asked
    assert all(t.isfinite().all() for t in result.model.values())
