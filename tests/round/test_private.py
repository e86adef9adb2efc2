"""The private mean of updates that hides single clients: clipping, noise, adaptive clipping and the tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from tests.small import federation, path, simulation
from undrift.algorithms.base import Cohort, Up
from undrift.algorithms.fedavg import FedAvg
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout
from undrift.core.names import names
from undrift.jobs.registry import algorithm_class
from undrift.round.private import SHARE, Privacy, Private, clipped_sum, draw_by_key, grow


def privacy(clip: float = 0.5, noise: float = 1.0, expected: float = 3.0, quantile: float = 0.0) -> Privacy:
    return Privacy(clip, noise, 1e-5, quantile, expected, 3)


def cohort_of(d: Tensor, padding: int = 0) -> Cohort:
    layout = Layout(("w",), (torch.Size((d.shape[-1] - padding,)),), padding)
    ids, weight = torch.arange(len(d)), torch.full((len(d), 1), 1 / max(1, len(d)), dtype=d.dtype)
    return Cohort(ids, ids, weight, torch.full_like(weight, 3.0), 0.1, 10, layout)


def private_mean(d: Tensor, how: Privacy, padding: int = 0, seed: int = 0, draw: Any = draw_by_key) -> Tensor:
    alg = Private(FedAvg(), how, seed, draw)  # type: ignore[arg-type]
    return alg.gather(alg.companion_init(torch.zeros_like(d[0]), 10), Up(d), cohort_of(d, padding))[0]


def test_updates_are_clipped_summed_and_divided_by_the_expected_number() -> None:
    d = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]], dtype=torch.float64)
    mean = private_mean(d, privacy(1.0, 1e-9, 4.0), padding=1)
    torch.testing.assert_close(mean, torch.tensor([0.225, 0.3, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)


def test_no_rounding_makes_an_update_longer_than_allowed() -> None:
    d = torch.randn(500, 1000, generator=torch.Generator().manual_seed(1)) * 10
    for row in d.split(1):
        total, _ = clipped_sum(row, torch.tensor([0.7], dtype=torch.float64), None)
        assert torch.linalg.vector_norm(total) <= 0.7


def test_the_noise_is_gaussian_as_large_as_said_and_leaves_padding_alone() -> None:
    drawn = 3 * private_mean(torch.zeros(1, 200_008), privacy(0.5, 3.0), padding=8).double()
    assert not drawn[-8:].any()
    assert stats.kstest(drawn[:-8].numpy() / 1.5, "norm").pvalue > 1e-3
    assert drawn[:-8].abs().max() > 4 * 1.5  # tails are there
    pairs = drawn[:200_000].view(2, -1)  # what one pair of words gives has no connection
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


def test_the_noise_of_a_simulation_is_repeatable_and_uses_the_whole_seed() -> None:
    """A generator of PyTorch looks at 32 bits of its seed, so that its noise can be searched."""
    old = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*old)
    nothing = torch.zeros(1, 50)
    drawn = [private_mean(nothing, privacy(), seed=seed) for seed in (5, 5, 5 + 2**32, 5 + 2**62)]
    assert torch.equal(drawn[0], drawn[1])
    assert not any(torch.equal(drawn[0], other) for other in drawn[2:])


def test_every_round_has_other_noise() -> None:
    alg = Private(FedAvg(), privacy())  # type: ignore[arg-type]
    companion, d, seen = alg.companion_init(torch.zeros(16), 10), torch.zeros(1, 16), []
    for _ in range(3):
        mean, companion = alg.gather(companion, Up(d), cohort_of(d))
        seen.append(mean)
    assert len({tuple(mean.tolist()) for mean in seen}) == 3


def test_the_sum_is_rounded_to_a_grid_much_coarser_than_floating_point() -> None:
    """What noise in floating point can be added to leaves traces in the last bits (Mironov, CCS 2012)."""
    d = torch.randn(4, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = private_mean(d, privacy(0.5, 1.0, 1.0))
    grid = 2.0**-21  # 2^-20 of the noise, rounded down to a power of two
    assert torch.equal(total / grid, (total / grid).round())


def test_adaptive_clipping_finds_the_quantile_and_its_two_noises_are_one() -> None:
    how = privacy(clip=10.0, noise=0.8, expected=50.0, quantile=0.5)
    alg = Private(FedAvg(), how)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    companion, bounds = alg.companion_init(torch.zeros(8), 50), []
    for _ in range(150):
        d = nn.functional.normalize(torch.randn(50, 8, generator=random)) * torch.linspace(0.02, 2, 50).unsqueeze(-1)
        _, companion = alg.gather(companion, Up(d), cohort_of(d))
        bounds.append(float(companion.bound))
    assert torch.tensor(bounds[-50:]).mean() == pytest.approx(1.0, rel=0.15)
    # Andrew et al., Theorem 1: 1 / z^2 = 1 / z_d^2 + 1 / (2 sigma_b)^2
    z_d, sigma_b = how.noise / (1 - SHARE) ** 0.5, how.noise / (2 * SHARE**0.5)
    assert z_d**-2 + (2 * sigma_b) ** -2 == pytest.approx(how.noise**-2)


def test_both_noises_of_adaptive_clipping_are_as_large_as_the_accounting_takes_them() -> None:
    how = privacy(clip=2.0, noise=0.8, expected=10.0, quantile=0.5)
    alg, nothing = Private(FedAvg(), how), torch.zeros(1, 2000)  # type: ignore[arg-type]
    companion = alg.companion_init(torch.zeros(2000), 10)
    counts, means = [], []
    for t in range(400):
        mean, after = alg.gather(companion._replace(t=companion.t + t), Up(nothing), cohort_of(nothing))
        counts.append((0.5 - torch.log(after.bound / companion.bound) / 0.2 - 0.5) * how.expected - 0.5)
        means.append(mean * how.expected)
    assert torch.cat(counts).std() == pytest.approx(how.noise / (2 * SHARE**0.5), rel=0.12)
    assert torch.cat(means).std() == pytest.approx(how.noise * 2.0 / (1 - SHARE) ** 0.5, rel=0.01)


def test_the_trees_noise_in_a_sum_is_that_of_its_nodes() -> None:
    """Against a tree that is kept as a dictionary of ranges: the sum up to n has the ranges of n's binary digits."""
    T, tree, length = 23, 13, 6
    alg = algorithm_class("dp-ftrl")(beta1=0.0, tree=tree)
    private = Private(alg, privacy(0.5, 1.0, 2.0))
    companion = private.companion_init(torch.zeros(length, dtype=torch.float64), 10)
    d, total = torch.full((1, length), 0.01, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    nodes: dict[tuple[int, int], Tensor] = {}
    for t in range(T):
        before = companion
        mean, companion = private.gather(companion, Up(d), cohort_of(d))
        fresh = 0.5 * draw_by_key(mix_key(before), length + 1)[:length]
        n = t % tree + 1
        if n == 1:
            nodes, total = {}, torch.zeros_like(total)
        nodes[n - (n & -n), n] = fresh
        total += mean * 2.0
        expected, end = torch.zeros_like(total), n
        while end:
            begin = end - (end & -end)
            expected, end = expected + nodes[begin, end], begin
        torch.testing.assert_close(total, n * d[0] + expected, rtol=0, atol=1e-4)


def mix_key(companion: Private.Companion) -> Tensor:
    from undrift.core.streams import fold

    return fold(companion.key, companion.t).squeeze(-1)


def test_a_tree_forgets_its_nodes_when_the_next_one_begins() -> None:
    nodes = torch.ones(3, 2)
    assert torch.equal(
        grow(nodes, torch.tensor([0]), torch.full((2,), 5.0)), torch.tensor([[5.0] * 2, [0.0] * 2, [0.0] * 2])
    )


@pytest.mark.parametrize("name", [name for name in names("algorithms") if not algorithm_class(name).pools])
def test_every_method_runs_privately_or_is_refused_in_one_line(name: str) -> None:
    alg = algorithm_class(name)(lr=0.1)
    settings: dict[str, Any] = dict(cohort=3, sampling="bernoulli", privacy=privacy(), seed=3)
    allowed = {
        "dp-ftrl", "fedadagrad", "fedadam", "fedavg", "fedavglm-z", "fedavgm", "fedavgslm-z", "fedcm", "fedmim", "fedmlb",
        "fedmlbm", "fedprox", "fedproxm", "fedsam", "fedyogi", "mofedsam", "fedacg", "fedntd", "fedasync", "fedbuff", "ffa-lora",
    }  # fmt: skip
    if name not in allowed:
        with pytest.raises(BadSetting, match="cannot be made private: .*; use one that needs only the sum") as refusal:
            simulation(alg, **settings)
        assert "\n" not in str(refusal.value)
        return
    points, other = path(simulation(alg, **settings), 3), path(simulation(alg, **(settings | {"seed": 4})), 3)
    assert points.isfinite().all() and not torch.equal(points, other)
    loud = path(simulation(alg, **(settings | {"privacy": privacy(noise=50.0)})), 3)
    assert (loud - points).norm() > 0.1


def test_with_hardly_any_noise_and_long_updates_allowed_it_is_the_plain_method() -> None:
    fed = federation((9,) * 6)
    plain = path(simulation(FedAvg(lr=0.1), fed=fed, cohort=6), 4)
    how = privacy(clip=1e6, noise=1e-16, expected=6.0)
    private = path(simulation(FedAvg(lr=0.1), fed=fed, cohort=6, sampling="bernoulli", privacy=how), 4)
    torch.testing.assert_close(private, plain, rtol=1e-5, atol=1e-6)


def test_a_round_without_anybody_looks_like_any_other() -> None:
    run = simulation(FedAvg(lr=0.1), cohort=1, sampling="bernoulli", privacy=privacy(expected=1.0))
    alone = next(t for t in range(50) if not len(run.attendance(t).ids))
    run.t = alone
    before = run.state.x.clone()
    record = run.round()
    assert record.clients == 0 and record.more["epsilon"] > 0
    moved = run.net.without_padding(run.state.x - before, "model")
    assert moved.std() == pytest.approx(0.5, rel=0.4)  # noise of sigma C / (q N)


class Broken(nn.Linear):
    """Divides by zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) / (inputs.detach().sum() * 0)


def test_nobody_whose_answer_counts_looks_like_any_other_round_too() -> None:
    how = privacy(expected=6.0)
    run = simulation(FedAvg(lr=0.1), Broken(5, 3), cohort=6, sampling="bernoulli", privacy=how, execution="pool")
    before = run.state.x.clone()
    record = run.round()
    assert record.dropped == record.clients == 6
    assert run.net.without_padding(run.state.x - before, "model").abs().min() > 0


def test_compression_is_refused() -> None:
    with pytest.raises(BadSetting, match="leave compress out"):
        simulation(FedAvg(lr=0.1), cohort=3, sampling="bernoulli", privacy=privacy(), compress="topk:4")


def test_batchnorm_is_refused() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(BadSetting, match="BatchNorm"):
        simulation(FedAvg(lr=0.1), module, cohort=3, sampling="bernoulli", privacy=privacy())


@pytest.mark.parametrize("largest", [1e-45, 1.0, 1e30, 3.3e38])
@pytest.mark.parametrize("bound", [1e-3, 0.5])
def test_no_update_is_longer_than_c_however_large_its_entries_are(largest: float, bound: float) -> None:
    """The factor for entries near the largest float is so small that a float32 keeps only a few bits of it."""
    d = torch.full((2, 10_000), largest, dtype=torch.float32)
    d[1] = 0.0
    cut, _ = clipped_sum(d, torch.tensor([bound], dtype=torch.float64), None)
    wanted = min(bound, float(d[0].double().norm()))
    assert wanted * (1 - 3e-6) <= float(cut.norm()) <= bound
