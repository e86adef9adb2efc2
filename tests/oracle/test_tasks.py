"""Yes or no from one output, and survival: against plain loops, with padding, and through whole rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.small import CPU, path, simulation
from undrift.algorithms.ditto import Ditto
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadSetting
from undrift.data import synthetic_patients
from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.oracle.losses import batch_loss
from undrift.oracle.net import Net
from undrift.oracle.tasks import LOSSES, binary_accuracy, binary_loss, concordance, cox_loss
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation
from undrift.simulate.whole_metrics import CIndex


def patients(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Risks [n, 1] and targets [n, 2] without equal times."""
    random = torch.Generator().manual_seed(seed)
    times = torch.randperm(1000, generator=random)[:n].double()
    events = (torch.rand(n, generator=random) < 0.6).double()
    return torch.randn(n, 1, dtype=torch.float64, generator=random), torch.stack([events, times], 1)


def by_hand(risks: Tensor, targets: Tensor) -> Tensor:
    """From the longest time to the shortest: each with an event is compared with all that were there before."""
    order = sorted(range(len(risks)), key=lambda i: -float(targets[i, 1]))
    total, there = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in order:
        there = there + risks[i, 0].exp()
        total = total + targets[i, 0] * (there.log() - risks[i, 0])
    return total / len(risks)


@pytest.mark.parametrize("n", [1, 2, 8, 30])
def test_coxs_loss_and_its_gradient_are_those_of_a_loop(n: int) -> None:
    for seed in range(3):
        risks, targets = patients(n, seed)
        risks.requires_grad_()
        ours, expected = cox_loss(risks, targets, None).mean(), by_hand(risks, targets)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
        gradients = [torch.autograd.grad(value, risks)[0] for value in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert n < 3 or bool(gradients[0].any())


def test_of_equal_times_each_is_at_risk_at_the_other() -> None:
    targets = torch.tensor([[1.0, 5.0], [1.0, 5.0], [0.0, 2.0]])
    assert cox_loss(torch.zeros(3, 1), targets, None).tolist() == pytest.approx([np.log(2), np.log(2), 0])


def test_padding_changes_nothing_whatever_it_holds() -> None:
    risks, targets = patients(5, 0)
    expected = cox_loss(risks, targets, None)
    padded = torch.cat([risks, torch.tensor([[torch.nan], [torch.inf]], dtype=torch.float64)]).requires_grad_()
    longer = torch.cat([targets, targets[:2]])
    real = torch.tensor([1.0] * 5 + [0.0] * 2)
    torch.testing.assert_close(cox_loss(padded, longer, real)[:5], expected)


def test_concordance_is_counted_pair_by_pair() -> None:
    for seed in range(5):
        risks, targets = patients(40, seed)
        risks = risks.flatten().round(decimals=1)  # some are equal
        right, known = 0.0, 0
        for i in range(40):
            for j in range(40):
                if targets[i, 0] == 1 and targets[i, 1] < targets[j, 1]:
                    known += 1
                    right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
        assert concordance(risks, targets) == pytest.approx(right / known)
    assert concordance(-risks, targets) == pytest.approx(1 - right / known)
    both = torch.tensor([[1.0, 3.0], [0.0, 3.0]])  # who was seen alive on the day of the other's death lived longer
    assert concordance(torch.tensor([1.0, 0.0]), both) == 1.0
    assert np.isnan(concordance(torch.tensor([1.0, 0.0]), both * torch.tensor([0.0, 1.0])))


def run_of(task: str, alg: Any, execution: str = "stacked", **settings: Any) -> Simulation:
    data = synthetic_patients.load(None, task=task, inputs=5)
    fed = federate(data, "sites", 4, 0, CPU)
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(5, 1)), LOSSES[task], torch.float64)
    metrics: dict[str, Any] = {"accuracy": binary_accuracy} if task == "binary" else {"c_index": CIndex()}
    plan = Plan(settings.pop("batch", 7), 0, 1.0, persistent=False)
    return Simulation(alg, net, fed, Settings(3, plan, execution=execution, **settings), metrics, CPU)


@pytest.mark.parametrize("task", LOSSES)
@pytest.mark.parametrize("alg", [FedAvg(lr=0.1), Scaffold(lr=0.05), Ditto(lr=0.1)], ids=lambda a: type(a).__name__)
def test_stacked_clients_with_padding_equal_clients_alone(task: str, alg: Any) -> None:
    runs = [run_of(task, alg, how) for how in ("stacked", "pool", "debug")]
    points = [path(run, 3) for run in runs]
    assert (points[0][2] - points[0][0]).norm() > 1e-2
    for other in points[1:]:
        torch.testing.assert_close(points[0], other, rtol=1e-12, atol=1e-14)


def test_a_round_is_that_of_a_plain_loop() -> None:
    """One client after another with the package's batches; Cox's loss sees each batch as a whole."""
    run = run_of("survival", FedAvg(lr=0.1))
    start, layout = run.state.x.clone(), run.net.layout
    who = run.attendance(0)
    table = run.data.table(run.plan, 0, 0, who.ids, np.zeros(3, np.int64))
    run.round()
    ends = []
    for s in range(3):
        w = layout.split(start)["1.weight"].clone().requires_grad_()
        for k in range(int(table.steps[s])):
            rows = torch.as_tensor(np.asarray(table.index[s, k, : int(table.count[s, k])]))
            x, y = run.data.train.take(rows).double(), run.data.train.targets[rows].double()
            (g,) = torch.autograd.grad(by_hand(x @ w.T, y), w)
            w = (w - 0.1 * g).detach().requires_grad_()
        ends.append(w.detach())
    torch.testing.assert_close(layout.split(run.state.x)["1.weight"], sum(ends) / 3, rtol=1e-10, atol=1e-12)


def test_a_metric_of_the_whole_set_is_taken_of_each_site() -> None:
    """Of the server's model, of personal ones on their own sites, and of every model on every site."""
    run = run_of("survival", Ditto(lr=0.1), eval_every=1)
    sites = run.round(last=True).more["sites"]
    own = run.data.held_out["test"]
    outputs = run.data.test.take(own.rows).double() @ run.net.layout.split(run.state.x)["1.weight"].T
    outputs = outputs + run.net.layout.split(run.state.x)["1.bias"]
    targets = run.data.test.targets[own.rows]
    expected = [concordance(outputs[own.owners == k].flatten(), targets[own.owners == k]) for k in range(4)]
    assert sites["test"]["global"]["c_index"] == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) > 1
    assert [sites["crossed"]["c_index"][k][k] for k in range(4)] == sites["test"]["personal"]["c_index"]
    assert len(sites["crossed_all"]["c_index"]) == 4 and len(sites["crossed_unseen"]["c_index"]) == 4


def test_a_loss_of_ones_own_may_see_the_batch_and_is_refused_in_another_shape() -> None:
    @batch_loss
    def spread(outputs: Tensor, targets: Tensor, real: Tensor | None) -> Tensor:
        """One number: how far apart the outputs are."""
        real = torch.ones_like(outputs[:, 0]) if real is None else real
        share = (real / real.sum()).unsqueeze(1)
        return (share * (outputs - (share * outputs).sum(0)).square()).sum()

    @batch_loss
    def wrong(outputs: Tensor, targets: Tensor, real: Tensor | None) -> Tensor:
        return torch.zeros(2, 3, 5)

    runs = []
    for how in ("stacked", "debug"):
        run = run_of("binary", FedAvg(lr=0.1), how)
        run.net.loss = spread
        run.net.of_batch = True
        runs.append(path(run, 2))
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-14)
    assert (runs[0][1] - runs[0][0]).norm() > 1e-3
    with pytest.raises(BadSetting, match="a batch_loss gives one number"):
        Net(nn.Linear(2, 1), wrong).sample_losses(torch.zeros(4, 1), torch.zeros(4))


def test_yes_or_no() -> None:
    outputs, targets = torch.tensor([[2.0], [-1.0]]), torch.tensor([1.0, 1.0])
    assert float(binary_loss(outputs, targets)) == pytest.approx((np.log1p(np.exp(-2)) + np.log1p(np.exp(1))) / 2)
    assert binary_accuracy(outputs, targets).tolist() == [True, False]
    assert simulation(FedAvg()).net.of_batch is False
