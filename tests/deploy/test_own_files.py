"""Clients with files of their own: the simulator's result on the federation of these files, and who is turned away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

flwr = pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict  # noqa: E402

from tests.deploy.test_federation import without  # noqa: E402
from tests.deploy.test_flower import Nodes, identity  # noqa: E402, F401
from undrift.core.errors import BadData, BadRunFolder, BadSetting  # noqa: E402
from undrift.data._user_file import read_user_file  # noqa: E402
from undrift.data.dataset import Dataset  # noqa: E402
from undrift.data.from_user import dataset_from  # noqa: E402
from undrift.deploy.app import write_app  # noqa: E402
from undrift.deploy.flower import from_records, server_app  # noqa: E402
from undrift.deploy.local import files_of  # noqa: E402
from undrift.deploy.settings import Plan  # noqa: E402
from undrift.jobs.run import build_simulation  # noqa: E402
from undrift.simulate.simulation import Simulation  # noqa: E402

NAMES = ("east", "north", "west")
SIZES = (7, 40, 23)
Files = dict[str, tuple[Any, Any]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)


def labelled(seed: int = 0) -> Files:
    random = np.random.default_rng(seed)
    found = {}
    for name, n in zip(NAMES, SIZES, strict=True):
        y = np.sort(random.integers(0, 3, n))  # in the order of classes, as files often are
        found[name] = (random.normal(size=(n, 5)) + y[:, None] + random.normal(size=5), y)
    return found


def planned(folder: Path, **settings: Any) -> Plan:
    given = {
        "weight_cap": 1.0,
        "dataset": "own",
        "shape": "5",
        "classes": 3,
        "names": ",".join(NAMES),
        "clients": 3,
        "cohort": 2,
    }
    given |= {
        "rounds": 3,
        "model": "logreg",
        "batch": 8,
        "steps": 3,
        "dtype": "float64",
        "device": "cpu",
        "eval_every": 1,
    }
    return Plan.of(given | {"out": str(folder / "out"), "wait": 0.1, "timeout": 5.0} | settings)


class Sites(Nodes):
    """Nodes that each have a file; some of them join late."""

    def __init__(self, plan: Plan, root: Path, files: Files) -> None:
        super().__init__(plan.run.clients, plan.flat(), root)
        self.late: dict[str, int] = {}  # the round in which a client joins, counted from 1
        self.trained = 0
        for name, (x, y) in files.items():
            np.savez(root / f"{name}.npz", x=x, y=y)
        for context in self.contexts.values():
            context.node_config["data"] = str(root / f"{context.node_config['name']}.npz")

    def of(self, name: str) -> Context:
        return next(c for c in self.contexts.values() if c.node_config["name"] == name)

    def get_node_ids(self) -> set[int]:
        late = {name for name, round in self.late.items() if self.trained + 1 < round}
        return {node for node, context in self.contexts.items() if context.node_config["name"] not in late}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        answers = super().send_and_receive(messages, timeout=timeout)
        rounds = (from_records(m.content).facts["round"] for m in messages if m.metadata.message_type == "train")
        self.trained = max(self.trained, *(int(t) + 1 for t in rounds), 0)
        return answers


def serve(plan: Plan, nodes: Nodes) -> None:
    config: Any = plan.flat()
    server_app()(nodes, Context(1, 1, {}, RecordDict(), config))  # type: ignore[arg-type]


def simulator(plan: Plan, files: Files, make: Callable[[Dataset], Dataset] = lambda d: d) -> Callable[[], Simulation]:
    """The simulator on the federation made of the same files."""
    data = make(dataset_from(([files[name] for name in NAMES], files["east"])))
    return lambda: build_simulation(plan.run, plan.alg, data, plan.run.model, torch.device("cpu"))


def same(plan: Plan, make: Callable[[], Simulation], lost: set[tuple[int, str]] | None = None) -> None:
    run = make()
    model = load_file(Path(plan.deploy.out) / "model.safetensors")
    expected = without(make, lost or set(), plan.run.rounds)[-1]
    found = run.net.without_padding(run.net.layout.join(model, run.state.x), "model")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert (found - run.net.without_padding(run.state.x, "model")).norm() > 1e-2  # it went somewhere


def records(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(plan.deploy.out) / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("settings", [{"weights": "size"}, {"epochs": 1.5, "steps": 0, "own_test": 0.2}])
def test_files_of_their_own_equal_the_simulator_on_the_same_files(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(tmp_path, algorithm=name, set={"lr": 0.05}, **settings)
    files = labelled()
    serve(plan, Sites(plan, tmp_path, files))
    same(plan, simulator(plan, files))
    assert all(r["accuracy"] is None and r["dropped"] == 0 for r in records(plan))  # it has nothing to test on


def test_masks_too_and_a_test_set_of_the_servers(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    files = {
        name: (random.integers(0, 255, (n, 16, 16, 3), dtype=np.uint8), random.integers(0, 3, (n, 16, 16)))
        for name, n in zip(NAMES, (3, 5, 4), strict=True)
    }
    settings = {
        "shape": "3,16,16",
        "classes": 0,
        "structures": "disc,cup",
        "model": "unet(width=2, depth=2)",
        "batch": 2,
    }
    plan = planned(tmp_path, **settings, test=str(tmp_path / "east.npz"), colour=0.3, rounds=2)

    def masks(data: Dataset) -> Dataset:
        return replace(data, classes=2, structures=("disc", "cup"))

    serve(plan, Sites(plan, tmp_path, files))
    make = simulator(plan, files, masks)
    same(plan, make)
    run = make()
    run.round()
    last = run.round(last=True)
    assert records(plan)[-1]["dice_cup"] == pytest.approx(last.more["dice_cup"]) and last.loss is not None
    assert records(plan)[-1]["loss"] == pytest.approx(last.loss)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("shape", "its inputs have the shape 4, but the run's model takes 5"),
        ("classes", "its targets go up to 4 classes, but the run's model has 3"),
        ("missing", "there is no file"),
        ("none", "start the node with data"),
        ("negative", "whole numbers from 0 on"),
        ("spoilt", "some of its samples have NaN or infinity"),
    ],
)
def test_a_node_whose_samples_do_not_fit_is_turned_away_by_name(
    what: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, plan = labelled(), planned(tmp_path, cohort=3)
    nodes = Sites(plan, tmp_path, files)
    x, y = files["north"]
    file = tmp_path / "north.npz"
    if what == "shape":
        np.savez(file, x=x[:, :4], y=y)
    elif what == "classes":
        np.savez(file, x=x, y=y + 1)
    elif what == "negative":
        np.savez(file, x=x, y=y - 1)
    elif what == "spoilt":
        np.savez(file, x=np.where(np.arange(len(x))[:, None] == 1, np.nan, x), y=y)
    elif what == "missing":
        file.unlink()
    else:
        del nodes.of("north").node_config["data"]
    serve(plan, nodes)
    said = capsys.readouterr().out
    assert said.count("north is turned away: ") == 1 and reason in said and "2 of 3 clients are there" in said
    (server,) = (line for line in said.splitlines() if "north is turned away" in line)
    assert str(tmp_path) not in server  # where a client keeps its samples is nobody else's business
    same(plan, simulator(plan, files), {(t, "1") for t in (1, 2, 3)})


def test_a_resumed_run_is_scored_on_the_samples_that_it_began_with(tmp_path: Path) -> None:
    for rounds, test in ((1, "east"), (2, "north")):
        plan = planned(tmp_path, rounds=rounds, test=str(tmp_path / f"{test}.npz"), resume=rounds > 1)
        nodes = Sites(plan, tmp_path, labelled())
        if rounds == 1:
            serve(plan, nodes)
    with pytest.raises(BadRunFolder, match="holds another run: the samples changed since it began"):
        serve(plan, nodes)


def test_a_client_refuses_to_train_on_samples_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the file was replaced after the server had asked."""
    files, plan = labelled(), planned(tmp_path, cohort=3, rounds=2)
    nodes = Sites(plan, tmp_path, files)
    asked = nodes.send_and_receive

    def replaced(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = asked(messages, timeout=timeout)
        x, y = files["west"]
        np.savez(tmp_path / "west.npz", x=x[:-1], y=y[:-1])
        return answers

    nodes.send_and_receive = replaced  # type: ignore[method-assign]
    serve(plan, nodes)
    said = capsys.readouterr().out
    assert said.count("west does not count: refused: it has 22 samples, but this round counts on 23") == 2
    same(plan, simulator(plan, files), {(1, "2"), (2, "2")})


def test_who_joins_late_counts_once_its_samples_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, plan = labelled(), planned(tmp_path, cohort=3, rounds=4, algorithm="scaffold", weights="size")
    nodes = Sites(plan, tmp_path, files)
    nodes.late = {"west": 2}
    serve(plan, nodes)
    assert "it has 23 samples, but this round counts on 1" in capsys.readouterr().out
    assert [r["dropped"] for r in records(plan)] == [1, 1, 0, 0]
    same(plan, simulator(plan, files), {(1, "2"), (2, "2")})


def test_a_resumed_run_remembers_how_much_a_client_has_that_is_away(tmp_path: Path) -> None:
    files, settings = labelled(), {"cohort": 3, "algorithm": "scaffold", "weights": "size"}
    serve(planned(tmp_path, rounds=1, **settings), Sites(planned(tmp_path, rounds=1, **settings), tmp_path, files))
    plan = planned(tmp_path, rounds=3, resume=True, **settings)
    nodes = Sites(plan, tmp_path, files)
    nodes.late = {"west": 2}  # away when the run goes on, back in the round after
    serve(plan, nodes)
    assert [r["dropped"] for r in records(plan)] == [0, 1, 0]
    same(plan, simulator(plan, files), {(2, "2")})


def test_a_node_keeps_its_file_out_of_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.of({"names": ",".join(NAMES), "clients": 3, "cohort": 3, "rounds": 1, "model": "logreg", "wait": 0.1}
                   | {"out": str(tmp_path / "out"), "device": "cpu"})  # fmt: skip
    nodes = Sites(plan, tmp_path, labelled())
    del nodes.of("east").node_config["data"]
    serve(plan, nodes)
    said = capsys.readouterr().out
    assert "north is turned away" in said and "west is turned away" in said and "the run's dataset is digits" in said
    assert records(plan)[0]["dropped"] == 2


def test_what_a_file_may_hold(tmp_path: Path) -> None:
    file, pictures, labels = tmp_path / "a.npz", np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3), np.arange(4)
    np.savez(file, x=pictures, y=labels, split=np.array(["train", "val", "test", "train"]))
    x, y = read_user_file(file, masks=False)
    assert x.shape == (2, 2, 3, 1) and y.tolist() == [0, 3] and read_user_file(file, False, "test")[1].tolist() == [2]
    np.savez(file, x_train=pictures[:3], y_train=labels[:3], x_test=pictures[3:], y_test=labels[3:])
    assert read_user_file(file, False)[1].tolist() == [0, 1, 2] and read_user_file(file, False, "test")[1].tolist() == [
        3
    ]
    np.savez(file, x=pictures, y=np.zeros((4, 2, 3), np.int64))
    assert read_user_file(file, masks=True)[1].shape == (4, 2, 3)
    for arrays, masks, reason in (
        ({"x": pictures}, False, "expected x_train and y_train, or x and y"),
        ({"x": pictures, "y": labels[:3]}, False, "one target for each"),
        ({"x": pictures, "y": labels / 2}, False, "expected class labels"),
        ({"x": pictures, "y": labels}, True, "expected masks"),
        ({"x": pictures, "y": np.zeros((4, 3, 3), int)}, True, "one of its size"),
        ({"x": pictures[:0], "y": labels[:0]}, False, "no samples for train"),
        ({"x": np.array([{}] * 4), "y": labels}, False, "cannot be read"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(BadData, match=reason):
            read_user_file(file, masks)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"shape": ""}, "give --shape"),
        ({"shape": "5,x"}, "give --shape"),
        ({"classes": 0}, "give --classes 10, or --structures"),
        ({"structures": "disc"}, "give --classes 10, or --structures"),
        ({"partition": "iid"}, "leave partition away"),
        ({"val_fraction": 0.1}, "leave val_fraction away"),
        ({"stop_at": "accuracy=0.9"}, "give --test"),
        ({"dataset": "digits"}, "is for --dataset own"),
    ],
)
def test_settings_that_do_not_go_with_own_files_are_refused(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BadSetting, match=reason):
        planned(tmp_path, **settings)


def test_the_app_says_what_a_clients_file_holds(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    write_app(tmp_path / "app", plan)
    text = (tmp_path / "app" / "README.md").read_text()
    assert "--data /path/to/site.npz" in text and "class labels [n] from 0 to 2" in text
    assert Plan.from_flat(plan.flat()) == plan
    with pytest.raises(BadSetting, match="goes with --dataset own"):
        files_of(plan, None)
    with pytest.raises(BadSetting, match=r"east.npz is not there"):
        files_of(plan, tmp_path)
