"""One process a block gives what one process gives, bit for bit: real processes, started by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pipeline.cases import CASES, batches, modules, outcome, rate
from tests.reference.dsp import Reference
from tests.simulate.test_ranks import finished, torchrun
from undrift.core.streams import Purpose, stream


def ran(folder: Path, blocks: int, replicas: int = 1) -> list[dict[str, Any]]:
    """What each rank saved."""
    processes = blocks * replicas
    arguments = [str(folder / "found"), str(blocks), str(replicas)]
    code, _, err = finished(torchrun(processes, "tests.pipeline.cases", *arguments))
    assert code == 0, err
    return [torch.load(folder / f"found.{rank}") for rank in range(processes)]


def test_processes_equal_the_simulator_bit_for_bit(tmp_path: Path) -> None:
    blocks = 3
    each = ran(tmp_path, blocks)
    for case in CASES:
        alone, first = outcome(case, blocks), each[0][case]
        exact = not case.startswith(("gpipe", "1f1b"))  # PyTorch's schedules divide and add in another order
        for when in ("stopped", "tensors"):
            assert first[when].keys() == alone[when].keys(), case
            for name, tensor in first[when].items():
                if exact:
                    assert torch.equal(tensor, alone[when][name]), (case, when, name)
                else:
                    torch.testing.assert_close(tensor, alone[when][name], rtol=1e-12, atol=1e-12)
        for rank in range(blocks):
            assert each[rank][case]["scores"] == pytest.approx(alone["scores"], rel=0 if exact else 1e-12), case
            if exact:
                assert each[rank][case]["differences"] == {rank: alone["differences"][rank]}, case
        last = each[-1][case]["losses"]
        assert len(last) == len(alone["losses"])
        for mine, other in zip(last, alone["losses"], strict=True):
            assert (mine is None) == (other is None), case
            if mine is not None and other is not None:
                torch.testing.assert_close(mine, other, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
        for way in (0, 1):  # activations and error gradients; those of the probed batch bring a second one
            sent = sum(each[rank][case]["bytes"][way] for rank in range(blocks))
            more = sent - alone["bytes"][way]
            assert more == 0 if way == 0 or not exact else more == (blocks - 1) * 12 * 8 * (4 if "32" in case else 8), (
                case
            )


def test_two_replicas_of_two_blocks_equal_the_reference(tmp_path: Path) -> None:
    each = ran(tmp_path, 2, 2)
    fed = [list(pair) for pair in zip(batches(seed=1), batches(seed=2), strict=True)]
    for case, queues in (("bp-k plain", ((0, 0), (0, 0))), ("dsp plain", ((1, 0), (2, 0)))):
        expected = Reference(modules(2, plain=True), *queues, fed, F.cross_entropy, [rate(n) for n in range(len(fed))])
        tensors = each[0][case]["tensors"]
        for k, block in enumerate(expected.parameters()):
            for name, weight in block.items():
                for replica in ("", "replica1."):
                    assert torch.equal(tensors[f"{replica}block{k}.module.0.{name}"], weight), (case, k, name)
    stats = each[0]["dsp"]["tensors"]
    assert torch.equal(stats["block0.module.0.0.weight"], stats["replica1.block0.module.0.0.weight"])
    mean = "block0.module.0.1.running_mean"
    assert not torch.equal(stats[mean], stats[f"replica1.{mean}"]), "statistics are each replica's own"
    joint = each[0]["dsp joint"]
    assert joint["tensors"].keys() == stats.keys()
    assert all(torch.equal(joint["tensors"][name], tensor) for name, tensor in stats.items()), (
        "an own all-reduce is the mean"
    )
    weight = "block1.module.0.0.weight"
    assert torch.equal(joint["model"][weight], 2 * stats[weight]), "what the optimiser shows is what is saved"
    assert joint["scores"] != each[0]["dsp"]["scores"] and joint["scores"] == each[3]["dsp joint"]["scores"]
    check_def(each[0], fed)


class DEFReference(Reference):
    """DSP whose replicas step by DEF (lambda = 0.3, one random block in four): z_d = x - lambda e_d, own momentum and error."""

    def __init__(self, *arguments: Any) -> None:
        self.e: dict[tuple[int, int], Tensor] = {}
        self.m: dict[tuple[int, int], Tensor] = {}
        self.z: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        super().__init__(*arguments)

    def version(self, k: int, t: int, d: int) -> dict[str, Tensor]:
        while t >= 0 and (k, t, d) not in self.z:  # as it was after its last update
            t -= 1
        return self.z[k, t, d] if t >= 0 else self.x[k][0]

    def updated(self, k: int, n: int, t: int, each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = torch.cat([w.flatten() for w in self.x[k][t].values()])
        size, kept = len(x), -(-len(x) // 4)
        start = stream(5, Purpose.KEPT, n, 0) * size >> 64
        block = (start + torch.arange(kept)) % size
        for d, gradient in enumerate(each):
            z = torch.cat([w.flatten() for w in self.version(k, t, d).values()])
            g = torch.cat([gradient[name].flatten() for name in gradient]) + 1e-2 * z
            m = self.m[k, d] = 0.9 * self.m.get((k, d), torch.zeros_like(x)) + g
            self.e[k, d] = self.e.get((k, d), torch.zeros_like(x)) + self.rates[n] * m
        x = x.index_add(0, block, -sum(self.e[k, d][block] for d in range(len(each))) / len(each))
        for d in range(len(each)):
            self.e[k, d] = self.e[k, d].index_fill(0, block, 0.0)
            self.z[k, t + 1, d] = self.named(k, x - 0.3 * self.e[k, d])
        return self.named(k, x)

    def named(self, k: int, vector: Tensor) -> dict[str, Tensor]:
        weights = self.x[k][0]
        pieces = vector.split([w.numel() for w in weights.values()])
        return {name: piece.view(w.shape) for (name, w), piece in zip(weights.items(), pieces, strict=True)}


def check_def(found: dict[str, Any], fed: list[list[tuple[Tensor, Tensor]]]) -> None:
    """Gradients joined by DEF: the definition with a random block, and plain momentum SGD where nothing is dropped."""
    rates = [rate(n) for n in range(len(fed))]
    expected = DEFReference(modules(2, plain=True), (1, 0), (2, 0), fed, F.cross_entropy, rates)
    end = len(fed) + 2
    for k in range(2):
        y = torch.cat([w.flatten() for w in expected.x[k][-1].values()]) - (expected.e[k, 0] + expected.e[k, 1]) / 2
        for name, weight in expected.named(k, y).items():
            torch.testing.assert_close(
                found["dsp def"]["model"][f"block{k}.module.0.{name}"], weight, rtol=1e-10, atol=1e-12
            )
        for d, replica in enumerate(("", "replica1.")):
            for name, weight in expected.version(k, end, d).items():
                own = found["dsp def"]["tensors"][f"{replica}block{k}.module.0.{name}"]
                torch.testing.assert_close(own, weight, rtol=1e-10, atol=1e-12)
    whole = Reference(modules(2, plain=True), (1, 0), (2, 0), fed, F.cross_entropy, rates, 0.9, False, 1e-2)
    for k, block in enumerate(whole.parameters()):
        for name, weight in block.items():
            torch.testing.assert_close(
                found["dsp def 1"]["model"][f"block{k}.module.0.{name}"], weight, rtol=1e-10, atol=1e-12
            )
