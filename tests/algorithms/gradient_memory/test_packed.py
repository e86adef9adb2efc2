"""GradMA's memory in five levels an entry: what rounding keeps, how much it takes, and what it must not change."""

from __future__ import annotations

import pytest
import torch

from tests.small import path, simulation
from undrift.algorithms.fedavgm import FedAvgM
from undrift.algorithms.gradient_memory import packed
from undrift.algorithms.gradient_memory.memory import Memory
from undrift.algorithms.gradient_memory.packed import BLOCK, LEVELS, PackedMemory, pack, unpack
from undrift.algorithms.gradma_s import GradMAS
from undrift.algorithms.gradma_s_compact import GradMASCompact
from undrift.core.layout import Layout
from undrift.core.trees import nbytes

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def rounded(rows: torch.Tensor) -> torch.Tensor:
    return unpack(*pack(rows), slice(0, rows.shape[1]), rows)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_normal_entries_keep_their_direction_as_well_as_five_levels_can() -> None:
    rows = normal(4, 96_000)
    cosine = torch.cosine_similarity(rows, rounded(rows))
    assert (cosine > 0.958).all() and (cosine < 0.961).all()  # sqrt(1 - 0.0799), Max 1960
    other = rows + 3 * normal(4, 96_000, seed=1)
    before, after = (torch.cosine_similarity(a, b) for a, b in ((rows, other), (rounded(rows), rounded(other))))
    torch.testing.assert_close(
        after, before * cosine * torch.cosine_similarity(other, rounded(other)), atol=0.006, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_are_kept_exactly_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    block = torch.tensor([LEVELS[k % 5] for k in range(90)] + [0.0] * 6, dtype=dtype)
    block = block / block.square().mean().sqrt()  # its root mean square is one, as that of its levels is not
    levels = torch.tensor(LEVELS, dtype=dtype)
    nearest = levels[(block[:, None] - levels).abs().argmin(1)]
    rows = torch.stack([block, 4 * block, torch.zeros(96, dtype=dtype)])
    torch.testing.assert_close(rounded(rows), torch.stack([nearest, 4 * nearest, 0 * block]), rtol=0, atol=0)


def test_any_part_of_a_row_is_unpacked_alone() -> None:
    rows = normal(3, 500)
    codes, scales = pack(rows)
    whole = unpack(codes, scales, slice(0, 500), rows)
    for part in (slice(0, 1), slice(95, 97), slice(96, 192), slice(100, 499), slice(499, 500)):
        assert torch.equal(unpack(codes, scales, part, rows), whole[:, part])


def test_a_memory_takes_an_eleventh() -> None:
    x = torch.zeros(96_000)
    full, small = GradMAS().server_init(x, 100, whole(x)).memory, PackedMemory.empty(100, x, 1)
    assert nbytes(full.rows) / nbytes((small.codes, small.scales)) == pytest.approx(384 / 34)
    assert nbytes(small) < nbytes(full.rows) / 10


def whole(x: torch.Tensor) -> Layout:
    return Layout(("w",), (x.shape,))


def test_without_slots_or_active_constraints_it_is_fedavgm() -> None:
    ours = path(simulation(GradMASCompact(slots=0, beta1=0.7, server_lr=0.9)), 6)
    assert torch.equal(ours, path(simulation(FedAvgM(beta1=0.7, server_lr=0.9)), 6))


def test_the_projected_momentum_goes_against_no_remembered_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "AT_A_TIME", BLOCK)  # so that a vector has several parts
    run = simulation(GradMASCompact(slots=6, beta1=0.9), cohort=2)
    active = 0.0
    for _ in range(12):
        active += run.round().more["qp_active"]
        m, memory = run.state.server.m, run.state.server.memory
        held = unpack(memory.codes, memory.scales, slice(0, len(m)), m)[memory.ids >= 0]
        assert (held @ m / held.norm(dim=1) / m.norm()).min() >= -1e-7
    assert active > 0


def test_rounding_keeps_what_the_projection_changes() -> None:
    """In 20,000 dimensions the change of m has nearly the same direction, because errors of rows are at right angles."""
    rows, m, place, segments = normal(8, 20_000), normal(20_000, seed=1), torch.arange(8), [slice(0, 20_000)]
    rows, m = rows + normal(20_000, seed=2), m - 0.5 * normal(20_000, seed=2)  # alike, and m is against them
    found = []
    for kind in (Memory, PackedMemory):
        memory, at = kind.empty(8, torch.zeros(20_000), 1).let_in(place)
        memory, along = memory.remember(at, rows, 0.5, segments, m)
        counts = memory.constrains(0.5)
        qp = memory.project(m, segments, along, counts, torch.zeros(1, 8, dtype=torch.bool), 0.0)
        assert qp.solved.all() and (qp.z > 0).any()
        found.append(qp.u - m)
    assert torch.cosine_similarity(found[0], found[1], dim=0) > 0.98
    assert abs(found[1].norm() / found[0].norm() - 1) < 0.02
