"""What Python offers around a run: typed keywords, loops over rounds, and what a result can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import undrift
from tests.small import QUICK, timeless
from undrift.core.errors import BadSetting, UnknownName
from undrift.dataparallel.command import run_parallel
from undrift.jobs.config import TYPES
from undrift.jobs.run_settings import RunSettings


def test_the_typed_keywords_are_the_settings() -> None:
    typed = get_type_hints(RunSettings)
    assert typed.pop("lr") is float
    assert typed == {name: kind for name, kind in TYPES.items() if name not in ("algorithm", "model")}


def test_a_loop_over_rounds_is_the_run() -> None:
    loop = undrift.rounds(QUICK, rounds=4)
    records = list(loop)
    whole = undrift.run(QUICK, rounds=4)
    assert timeless(records) == timeless(whole.records) and loop.result is not None
    assert loop.result.stopped == "rounds"
    assert all(torch.equal(loop.result.model[n], t) for n, t in whole.model.items())


def test_break_ends_with_a_checkpoint(tmp_path: Path) -> None:
    loop = undrift.rounds(QUICK, rounds=6, out=tmp_path / "run")
    for record in loop:
        if record["round"] == 2:
            break
    assert loop.result is not None and loop.result.stopped == "break" and len(loop.result.records) == 2
    resumed = undrift.run(out=tmp_path / "run", resume=True)
    whole = undrift.run(QUICK, rounds=6)
    assert timeless(resumed.records) == timeless(whole.records)
    assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())


def test_on_round_sees_every_record() -> None:
    seen: list[dict[str, Any]] = []
    result = undrift.run(QUICK, rounds=3, on_round=seen.append)
    assert timeless(seen) == timeless(result.records) and len(seen) == 3


def test_stop_at_any_number_of_the_record() -> None:
    low = undrift.run(QUICK, rounds=300, stop_at="train_loss<1.5,accuracy=0.99", lr=0.1)
    assert low.stopped == "train_loss" and len(low.records) < 300
    assert low.records[-1]["train_loss"] < 1.5 <= min(r["train_loss"] for r in low.records[:-1])
    f1 = undrift.run(QUICK, rounds=300, stop_at="f1=0.5", metrics=["f1"], eval_every=1)
    assert f1.stopped == "f1" and f1.records[-1]["f1"] >= 0.5 > f1.records[-2]["f1"]
    for wrong in ("accuracy=90", "loss<low", "time<3s", "=3", "loss"):
        with pytest.raises(
            BadSetting, match="is not understood; write accuracy=0.9, loss<0.2 or time=10m|lies between 0 and 1"
        ):
            undrift.run(QUICK, stop_at=wrong)


def test_a_number_to_stop_at_that_no_round_has_is_told() -> None:
    with pytest.warns(UserWarning, match="stop_at will not end the run.*'acc'; did you mean 'accuracy'") as told:
        result = undrift.run(QUICK, rounds=6, stop_at="acc=0.1,train_loss<0.01")
    assert result.stopped == "rounds" and len(told) == 1
    with pytest.warns(UserWarning, match="class_accuracies"):  # a list is no number
        assert undrift.run(QUICK, rounds=3, stop_at="class_accuracies<0.5").stopped == "rounds"


def test_a_result_is_a_frame_a_page_and_a_cell_of_a_notebook(tmp_path: Path) -> None:
    result = undrift.run(QUICK, rounds=6, out=tmp_path / "run")
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame.index) == list(range(1, 7))
    assert frame["train_loss"].tolist() == [r["train_loss"] for r in result.records]
    page = result.report(tmp_path / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and f"{result.accuracy:.4f}" in page
    assert repr(result).startswith("<undrift.Result: ") and "\n" not in repr(result) and len(repr(result)) < 300
    shown = result._repr_html_()
    assert shown.count("<tr>") == 3 and f"<td>{result.accuracy:.4g}</td>" in shown
    with pytest.raises(BadSetting, match="give out= to the run"):
        undrift.run(QUICK, rounds=1).report(tmp_path / "other.html")


def test_a_result_has_a_row_for_each_client(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    result = undrift.run(QUICK, rounds=5, out=tmp_path / "run")
    clients = result.clients()
    assert list(clients.index) == list(range(12)) and clients["samples"].sum() == result.about["samples"]
    accuracies = clients["accuracy"].quantile([0.1, 0.5, 0.9]).tolist()
    kept = [result.records[-1][f"client_accuracy_p{p}"] for p in (10, 50, 90)]
    assert accuracies == pytest.approx(kept) and clients["accuracy"].nunique() > 3
    again = undrift.run(out=tmp_path / "run", resume=True)  # finished: the scores are measured once more
    assert again.clients()["accuracy"].tolist() == clients["accuracy"].tolist()
    assert again.personal_models == []
    assert run_parallel(rounds=1, steps=1, workers=2, model="logreg").clients().empty


def test_a_result_has_the_models_of_personal_methods() -> None:
    result = undrift.run(QUICK, algorithm="local", rounds=6)
    assert len(result.personal_models) == 12 and all(m.keys() == result.model.keys() for m in result.personal_models)
    name = next(iter(result.model))
    differ = [not torch.equal(model[name], result.model[name]) for model in result.personal_models]
    assert sum(differ) > 3


def test_a_wrong_keyword_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'rounds'"):
        undrift.rounds(round=3).__iter__().__next__()  # type: ignore[call-arg]


def test_curves_take_numbers_and_draw_a_picture() -> None:
    curves = undrift.Curves()
    result = undrift.run(QUICK, rounds=6, on_round=curves)
    scored = [r for r in result.records if r["accuracy"] is not None]
    assert curves.points["accuracy"] == [(r["round"], r["accuracy"]) for r in scored]
    assert [t for t, _ in curves.points["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert curves._repr_png_().startswith(b"\x89PNG") and curves.handle is None, "there is no notebook"
    named = undrift.Curves(["bytes_up", "nothing"])
    named({"round": 1, "bytes_up": 5, "loss": 0.1})
    named({"round": 2, "bytes_up": float("nan")})
    assert named.points == {"bytes_up": [(1, 5.0)]}
    assert "data:image/png;base64," in result._repr_html_()


def test_a_notebook_shows_live_curves_in_place() -> None:
    """A real kernel runs the cell; its messages are what a notebook would show."""
    client = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")

    class Client(client.NotebookClient):  # type: ignore[misc, name-defined]
        pictures: list[str] = []

        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            if message["msg_type"] in ("display_data", "update_display_data"):
                self.pictures.append(message["msg_type"])
            return super().process_message(message, cell, index)

    code = f"""
import undrift, undrift.jobs.curves
undrift.jobs.curves.PAUSE = undrift.jobs.curves.REST = 0.0
undrift.run({QUICK!r}, rounds=5, on_round=undrift.Curves())"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook = Client(book, timeout=120, kernel_name="python3")
    notebook.execute()
    drawn, result = book.cells[0].outputs
    assert drawn.output_type == "display_data" and "image/png" in drawn.data, "one output, however often it was drawn"
    assert notebook.pictures == ["display_data"] + 4 * ["update_display_data"]
    assert result.output_type == "execute_result" and "<table>" in result.data["text/html"]
