"""The metrics of the record against plain loops: forgetting, the clients' own scores, local facts, weight decay's reach."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F

import undrift
from tests import small
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.gradma_w import GradMAW
from undrift.core.errors import BadSetting, UndriftError, UnknownName
from undrift.core.names import names
from undrift.core.streams import Purpose, sample, stream
from undrift.jobs.registry import algorithm_class
from undrift.simulate import evaluate
from undrift.simulate.evaluate import accuracy
from undrift.simulate.simulation import Simulation


def outputs(run: Simulation, inputs: torch.Tensor) -> torch.Tensor:
    """What the server's model says, by the module itself."""
    module = small.tiny_mlp().double()
    module.load_state_dict(run.model())
    with torch.no_grad():
        said: torch.Tensor = module.eval()(inputs.double())
    return said


def test_forgetting_is_the_best_earlier_minus_the_present_accuracy_of_each_class() -> None:
    run = small.simulation(FedAvg(lr=1.0), steps=8)
    labels, best, seen = run.data.test.targets, np.zeros(3), []
    for t in range(8):
        record = run.round()
        right = (outputs(run, run.data.test.held).argmax(1) == labels).double()
        now = np.array([right[labels == c].mean() for c in range(3)])
        if t == 0:
            assert "forgetting" not in record.more
        else:
            assert record.more["forgetting"] == pytest.approx(np.mean(best - now), abs=1e-12)
            assert record.more["class_accuracies"] == pytest.approx(now, abs=1e-4)
            seen.append(record.more["forgetting"])
        best = np.maximum(best, now) if t else now
    assert max(seen) > 0.01, "the case is of no use unless something is forgotten"


def test_forgetting_goes_on_after_a_restore() -> None:
    whole, half, rest = (small.simulation(FedAvg(lr=1.0), steps=8) for _ in range(3))
    expected = [whole.round().more.get("forgetting") for _ in range(6)]
    for _ in range(3):
        half.round()
    rest.restore(half.tensors(), 3)
    assert [rest.round().more["forgetting"] for _ in range(3)] == expected[3:]


@pytest.mark.parametrize("every", [0, 2])
def test_the_clients_own_scores(every: int) -> None:
    run = small.simulation(FedAvg(lr=0.5), client_eval_every=every)
    for t in range(1, 6):
        ids, _ = run.sampling.invite(run.t)
        more = run.round(last=t == 5).more
        if t != 5 and not (every and t % every == 0):
            assert "absent_loss" not in more and "client_accuracy_p50" not in more
            continue
        absent, each = [], []
        for i, (start, size) in enumerate(zip(run.data.start, run.data.sizes, strict=True)):
            rows = run.data.members[start : start + size]
            said, labels = outputs(run, run.data.train.held[rows]), run.data.train.targets[rows]
            each.append(float((said.argmax(1) == labels).double().mean()))
            if i not in ids.tolist():
                absent += F.cross_entropy(said, labels, reduction="none").tolist()
        assert more["absent_loss"] == pytest.approx(np.mean(absent), abs=1e-12)
        for q in (10, 50, 90):
            assert more[f"client_accuracy_p{q}"] == pytest.approx(np.percentile(each, q), abs=1e-12)
        assert more["client_accuracies"] == pytest.approx(np.percentile(each, range(0, 101, 5)), abs=1e-4)


def test_of_very_many_clients_a_sample_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MOST_SCORED", 4)
    run = small.simulation(FedAvg(lr=0.5), client_eval_every=1, cohort=2, seed=3)
    chosen = sorted(sample(stream(3, Purpose.SCORED), 6, 4))
    assert chosen != [0, 1, 2, 3]
    for _ in range(3):
        ids, _ = run.sampling.invite(run.t)
        more = run.round().more
        own = {i: run.data.rows_of(np.array([i]))[0] for i in chosen}
        said = {i: outputs(run, run.data.train.held[rows]) for i, rows in own.items()}
        labels = {i: run.data.train.targets[rows] for i, rows in own.items()}
        each = [float((said[i].argmax(1) == labels[i]).double().mean()) for i in chosen]
        absent = [F.cross_entropy(said[i], labels[i], reduction="none") for i in chosen if i not in ids.tolist()]
        assert more["absent_loss"] == pytest.approx(float(torch.cat(absent).mean()), abs=1e-12)
        for q in (10, 50, 90):
            assert more[f"client_accuracy_p{q}"] == pytest.approx(np.percentile(each, q), abs=1e-12)


def test_with_everybody_present_nobody_is_absent() -> None:
    record = small.simulation(FedAvg(), cohort=6).round(last=True)
    assert "absent_loss" not in record.more and "client_accuracy_p10" in record.more


@pytest.mark.parametrize("execution", ["stacked", "pool"])
def test_active_constraints_of_the_workers_are_counted(execution: str) -> None:
    """With a tiny rate the gradient stays the same: it breaks nothing in the first step, where x = x_t, and afterwards
    only the third constraint, because x - x_t points against it.
    """
    for steps in (1, 5):
        more = small.simulation(GradMAW(lr=1e-9), steps=steps, batch=40, execution=execution).round().more
        assert more["local_qp_active"] == pytest.approx((steps - 1) / steps)


@pytest.mark.parametrize("name", [name for name in names("algorithms") if name != "local"])  # its server stands still
def test_weight_decay_can_spare_biases(name: str) -> None:
    """With a huge decay and no gradient to speak of, weights shrink and biases do not; both shrink by default."""
    lr, decay = 1e-3, 100.0
    kind = algorithm_class(name)
    at_once: dict[str, dict[str, Any]] = {  # the body moves, and all entries are sent
        "fedrep": {"head_steps": 0},
        "streaming-diloco": {"fragments": 1},
        "sparseloco": {"ratio": 1.0, "bits": 0},
    }
    fields = {"lr": lr, "weight_decay": decay} | at_once.get(name, {})
    x = {}
    for spare in (True, False):
        run = small.simulation(
            kind(**fields, decay_biases=not spare), small.tiny_mlp().requires_grad_(), steps=1, cohort=6
        )
        sent = functools.partial(run.net.without_padding, tag="model")
        before = sent(run.state.x)
        run.round()
        x[spare] = sent(run.state.x)
    biases = torch.cat([torch.full((s.numel(),), len(s) == 1) for s in run.net.layout.shapes])
    assert not torch.allclose(x[True][biases], x[False][biases], rtol=1e-3)
    assert torch.allclose(x[True][~biases], x[False][~biases], rtol=1e-9)
    assert not torch.allclose(before[~biases], x[True][~biases], rtol=1e-3)


ARRAYS = (np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3)
OWN = {"clients": 2, "cohort": 2, "steps": 2, "batch": 8, "rounds": 2, "partition": "iid"}
MODEL = small.tiny_mlp()


def predicted(result: undrift.Result[undrift.RunConfig]) -> torch.Tensor:
    module = small.tiny_mlp()
    module.load_state_dict(result.model)
    with torch.no_grad():
        return module.eval()(torch.from_numpy(ARRAYS[0]))


def test_metrics_are_measured_beside_accuracy_over_the_whole_test_set() -> None:
    metrics = {"doubt": lambda o, t: 1 - o.softmax(1).amax(1)} | {
        n: n for n in ("f1", "auc", "calibration", "perplexity")
    }
    result = undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), metrics=metrics)
    outputs, labels, last = predicted(result), ARRAYS[1], result.records[-1]
    probabilities, said = outputs.softmax(1).numpy(), outputs.argmax(1).numpy()
    assert last["accuracy"] == pytest.approx((said == labels).mean())
    assert last["doubt"] == pytest.approx(1 - probabilities.max(1).mean(), abs=1e-5)
    assert last["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, said, average="macro"))
    expected = sklearn.metrics.roc_auc_score(labels, probabilities, multi_class="ovr")
    assert last["auc"] == pytest.approx(expected, abs=1e-6)
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-5)
    assert 0 < last["calibration"] < 1


def test_an_object_with_update_and_compute_sees_every_sample_once() -> None:
    class Count:
        def reset(self) -> None:
            self.seen = 0

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            assert len(outputs) == len(targets)
            self.seen += len(targets)

        def compute(self) -> float:
            return float(self.seen)

    x, y = (np.concatenate([part] * 40) for part in ARRAYS)  # 2400: several batches
    last = undrift.run(OWN, model=MODEL, data=(*ARRAYS, x, y), metrics={"count": Count()}).records[-1]
    assert last["count"] == 2400 and last["accuracy"] is not None


def test_torchmetrics_are_accepted() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
    metric = torchmetrics.classification.MulticlassF1Score(num_classes=3)
    last = undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), metrics={"theirs": metric, "f1": "f1"}).records[-1]
    assert last["theirs"] == pytest.approx(last["f1"], abs=1e-6)
    every = torchmetrics.classification.MulticlassF1Score(num_classes=3, average=None)
    with pytest.raises(BadSetting, match=r"gives \[3\] numbers, not one"):
        undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), metrics={"theirs": every})


def test_scores_of_the_wrong_shape_are_refused_and_broadcasting_is_warned_of() -> None:
    numbers = ARRAYS[0], ARRAYS[0][:, 0], ARRAYS[0], ARRAYS[0][:, 0]
    with pytest.raises(BadSetting, match=r"metric 'raw' gives \[60, 3\] for 60 samples"):
        undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), metrics={"raw": lambda o, t: o})
    with pytest.raises(UndriftError, match=r"the loss must give one number .* not a tensor \[1, 3\]"):
        undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), loss=lambda o, t: o * 2)
    with pytest.warns(UserWarning, match=r"outputs are \[1\] a sample and the targets \[\]: .* may broadcast"):
        undrift.run(OWN, model=torch.nn.Linear(5, 1), data=numbers, loss=lambda o, t: (o.flatten() - t).square().mean())
    with pytest.raises(UnknownName, match="did you mean 'f1'"):
        undrift.run(OWN, model=MODEL, data=(*ARRAYS, *ARRAYS), metrics=["f2"])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_labels_count_neither_in_loss_nor_in_accuracy(smoothing: float) -> None:
    """As if the samples were not there, whatever the loss."""
    loss = torch.nn.CrossEntropyLoss(ignore_index=7, label_smoothing=smoothing)
    settings = OWN | {"rounds": 1, "steps": 1, "batch": 200}
    x, y = ARRAYS
    rows = [((x[:30], y[:30]), (x[30:], y[30:]))]
    padded = [(np.concatenate([a, a + 1]), np.concatenate([b, np.full(len(b), 7)])) for a, b in rows[0]]
    whole = np.concatenate([x, x]), np.concatenate([y, np.full(60, 7)])
    given = {"loss": loss, "metrics": {"accuracy": accuracy, "f1": "f1"}, "model": MODEL}
    plain = undrift.run(settings, data=(list(rows[0]), (x, y)), **given)
    full = undrift.run(settings, data=(padded, whole), **given)
    for name in ("loss", "accuracy", "train_loss", "f1"):
        assert full.records[-1][name] == pytest.approx(plain.records[-1][name], rel=1e-5), name
    for name, tensor in plain.model.items():
        torch.testing.assert_close(full.model[name], tensor)
