"""Flower's SuperLink as `undrift deploy server` starts it."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

pytest.importorskip("flwr")

from flwr.supercore import sql_mixin

from undrift.deploy import superlink


def test_its_database_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    before = sql_mixin.SQLITE_PRAGMAS
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", before)

    def connect() -> None:
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            sql_mixin._set_sqlite_pragmas(database, None)
            found.append(database.execute("PRAGMA busy_timeout").fetchone()[0])

    monkeypatch.setattr(superlink, "flower_superlink", connect)
    connect()
    superlink.main()
    assert found == [5000, 120_000] and dict(sql_mixin.SQLITE_PRAGMAS).keys() == dict(before).keys()
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", ())
    with pytest.raises(SystemExit, match="another way"):
        superlink.main()
