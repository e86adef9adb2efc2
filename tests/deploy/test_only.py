"""A node runs undrift's own client app, whatever app the server has sent."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.clientapp import ClientApp
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

from undrift.deploy import only
from undrift.deploy.join import write_programs


def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's module, which is as it was after the test."""
    loader = importlib.import_module(only.LOADER)
    for name in only.FUNCTIONS:
        monkeypatch.setattr(loader, name, getattr(loader, name))
    return loader


def test_what_was_sent_is_neither_unpacked_nor_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, made, loaded = kept(monkeypatch), client(monkeypatch), list[ClientApp]()

    def as_flower_does() -> None:
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
        loader.install_from_fab(b"rubbish", skip_prompt=True)
        load = loader.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        loaded.append(load("publisher/evil", "1.0.0", "hash"))

    monkeypatch.setattr(only, "flwr_clientapp", as_flower_does)
    only.main()
    assert loaded == [made] and not (tmp_path / "flwr").exists()


def client(monkeypatch: pytest.MonkeyPatch) -> ClientApp:
    made = ClientApp()
    monkeypatch.setattr(only, "client_app", lambda: made)
    return made


@pytest.mark.parametrize("name", only.FUNCTIONS)
def test_a_flower_that_loads_apps_in_another_way_runs_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kept(monkeypatch), name)
    monkeypatch.setattr(only, "flwr_clientapp", lambda: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=f"without {name}"):
        only.main()


def test_nothing_else_is_started_on_a_node(tmp_path: Path) -> None:
    write_programs(tmp_path / "bin", "own")
    texts = {file.name: file.read_text() for file in (tmp_path / "bin").iterdir()}
    assert texts.keys() == set(TASK_TYPE_TO_COMMAND.values()) and all(
        os.access(tmp_path / "bin" / n, os.X_OK) for n in texts
    )
    assert [name for name, text in texts.items() if "undrift" in text] == ["flwr-clientapp"]
    assert {os.system(str(tmp_path / "bin" / name)) != 0 for name in texts if name != "flwr-clientapp"} == {True}
