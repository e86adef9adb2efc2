"""One process a block gives what one process gives, bit for bit: real processes, started by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.pipeline_cases import CASES, batches, modules, outcome, rate
from tests.reference.dsp import Reference
from tests.test_ranks import finished, torchrun


def ran(folder: Path, blocks: int, replicas: int = 1) -> list[dict[str, Any]]:
    """What each rank saved."""
    processes = blocks * replicas
    arguments = [str(folder / "found"), str(blocks), str(replicas)]
    code, _, err = finished(torchrun(processes, "tests.pipeline_cases", *arguments))
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
