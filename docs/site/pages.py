"""What the site has beside docs/: the README, notebooks as they were run, the command line, papers; and links that fit."""

from __future__ import annotations

import base64
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from undrift.cli.parser import COMMANDS, command_parsers
from undrift.core.papers import bibliography, papers_of
from undrift.dataparallel.methods import FILES as DATAPARALLEL
from undrift.jobs import shipped
from undrift.pipeline.engines import METHODS as PIPELINE

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "build" / "notebooks"
MORE = (*DATAPARALLEL, *PIPELINE)  # methods without a page of their own
# Pages of the site by the files that they are made of; files in docs/ are pages by themselves.
MADE = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/RESULTS.md": "speed.md",
}
SOURCES = {page: file for file, page in MADE.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that follow from files."""
    algorithms = sorted(path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md") if path.stem != "README")
    parts = {
        "ALGORITHMS": ["algorithms/README.md", *({name: f"algorithms/{name}.md"} for name in algorithms)],
        "PAPERS": [{name: f"papers/{name}.md"} for name in papers()],
    }
    for entry in config.nav or []:
        for name, value in entry.items():
            if isinstance(value, str):
                entry[name] = parts.get(value, value)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, in place of docs/README.md."""
    readme = files.get_file_from_path("README.md")
    assert readme is not None
    files.remove(readme)
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for file, page in MADE.items()}
    pages |= {f"notebooks/{file.stem}.md": as_markdown(file) for file in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    pages |= {f"papers/{name}.md": paper_page(name) for name in papers()}
    pages["reference/command-line.md"] = command_line()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site where there is one, and to the repository otherwise."""
    here = page.file.src_uri
    source = Path(SOURCES.get(here, f"docs/{here}"))

    def follow(found: re.Match[str]) -> str:
        link, hash, part = found[2].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return found[0]
        target = os.path.normpath(source.parent / link)
        return f"{found[1]}({address(target, here, config.extra['repository'])}{hash}{part})"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(b if b.startswith("```") else re.sub(r"(\])\(([^)\s]+)\)", follow, b) for b in blocks)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads something from elsewhere."""
    if found := re.search(r"<(script|link|img|iframe)\b[^>]*\b(src|href)=[\"']?(https?:)?//[^\"' >]*", output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


def address(target: str, here: str, repository: str) -> str:
    """Where a file or folder of the repository is, seen from a page of the site."""
    if not (ROOT / target).exists():
        raise PluginError(f"{here} links to {target}, which is not there")
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").exists():
        target = f"{target}/README.md"
    page = MADE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    if page and not page.endswith((".py", ".ipynb")) and not (ROOT / target).is_dir():
        return os.path.relpath(page, Path(here).parent)
    if target.startswith("docs/notebooks/"):
        return os.path.relpath(f"notebooks/{Path(target).stem}.md", Path(here).parent)
    return f"{repository}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"


def as_markdown(file: Path) -> str:
    """A notebook with what it printed when it was run."""
    run = RUN / file.name
    if not run.exists() or run.stat().st_mtime < file.stat().st_mtime:
        raise PluginError(f"{file.name} was not run since it was changed; run docs/site/notebooks.py")
    cells = json.loads(run.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            content = "".join(data["image/png"]).replace("\n", "")
            base64.b64decode(content, validate=True)
            yield f'<img alt="what the cell draws" src="data:image/png;base64,{content}">'
        elif "text/html" in data:
            yield f"<div>{''.join(data['text/html'])}</div>"
        else:
            text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            if text:
                yield f"```text\n{text}\n```"


def command_line() -> str:
    """Every command with its --help."""
    os.environ["COLUMNS"] = "110"  # of the help
    parsers = command_parsers()
    parts = ["# Command line", "`undrift COMMAND --help` prints the same."]
    for name, about, _, aliases, _ in COMMANDS:
        also = f" Also `undrift {aliases[0]}`." if aliases else ""
        parts += [
            f"## undrift {name}",
            f"{about[0].upper()}{about[1:]}.{also}",
            f"```text\n{parsers[name].format_help()}```",
        ]
    return "\n\n".join(parts) + "\n"


def papers() -> dict[str, list[Path]]:
    """The tables and figures of each paper that undrift reproduces."""
    found: dict[str, list[Path]] = {}
    for file in sorted(shipped.PAPERS.glob("*.toml")):
        found.setdefault(file.stem.partition("-")[0], []).append(file)
    return found


def paper_page(name: str) -> str:
    """A paper: how to cite it, its methods, and each table with its published numbers and the command that runs it."""
    entry = papers_of(name)[0]
    heading = re.search(r"title *= *{(.*)}", entry)
    assert heading is not None
    described = {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")}
    methods = [
        method for method, entries in bibliography().items() if entry in entries and method in {*described, *MORE}
    ]
    links = [f"[{m}](../algorithms/{m}.md)" if m in described else f"`{m}`" for m in methods]
    here = f"Methods here: {', '.join(links)}. " if methods else ""
    more = "[How a table is run and judged](../reproduce.md), [what came out](../results.md)."
    parts = [f"# {re.sub('[{}]', '', heading[1])}", f"```bibtex\n{entry}\n```", here + more]
    for file in papers()[name]:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {content['title']}", content.get("about", ""), f"```sh\nundrift reproduce {file.stem}\n```"]
        if file.with_suffix(".csv").exists():
            rows = [line.split(",") for line in published(file.with_suffix(".csv"))]
            head, *body = ["| " + " | ".join(row) + " |" for row in rows]
            parts.append("\n".join([head, "| --- " * len(rows[0]) + "|", *body]))
    return "\n\n".join(part for part in parts if part) + "\n"


def published(file: Path) -> list[str]:
    """The lines of a table's numbers; commas within quotes become thin spaces."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        re.sub(r'"([^"]*)"', lambda found: found[1].replace(",", "\u202f"), line).replace("|", "\\|") for line in lines
    ]
