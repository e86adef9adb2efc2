"""The same results on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from undrift.folder import RunFolder
from undrift.registry import names

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUICK = {"clients": 20, "cohort": 6, "batch": 16, "rounds": 4, "eval_every": 2, "execution": "stacked"}


def run(device: str, **settings: Any) -> undrift.Result:
    return undrift.run(QUICK | {"device": device} | settings)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
@pytest.mark.parametrize("model", ["mlp", "gradma-nn"])
def test_cuda_agrees_with_the_cpu(name: str, model: str, replay: bool) -> None:
    """Float64, epochs (unequal steps), BatchNorm: the streams are integer arithmetic, so cohorts and batches are the same."""
    settings = {"algorithm": name, "model": model, "dtype": "float64", "epochs": 1.0}
    here, there = run("cpu", **settings), run("cuda", replay=replay, **settings)
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-9, atol=1e-9)
    assert [r["bytes_up"] for r in here.records] == [r["bytes_up"] for r in there.records]


def test_dropout_and_convolutions_agree_with_the_cpu() -> None:
    import numpy as np

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 28, 28, 1), dtype=np.uint8)
    labels = random.integers(0, 10, 200)
    data = undrift.Dataset("random", images, labels, images[:20], labels[:20], 10, (0.5,), (0.5,), crop=2, flip=True)
    here, there = (
        undrift.run(QUICK | {"device": d}, data=data, model="gradma-lenet5", dtype="float64", partition="iid", rounds=2)
        for d in ("cpu", "cuda")
    )
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", names("algorithms"))
def test_deterministic_runs_repeat_and_resume_bit_for_bit(name: str, replay: bool, tmp_path: Path) -> None:
    how = {"algorithm": name, "deterministic": True, "replay": replay}
    once, twice = (run("cuda", **how) for _ in range(2))
    cut = undrift.run(QUICK | {"device": "cuda", "rounds": 2}, **how, out=tmp_path / "r")
    assert len(cut.records) == 2
    resumed = undrift.run(out=tmp_path / "r", resume=True, rounds=4)
    for n, tensor in once.model.items():
        assert torch.equal(twice.model[n], tensor)
        assert torch.equal(resumed.model[n], tensor)


def test_chunks_shrink_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.simulate import execute

    whole = run("cuda", algorithm="scaffold", dtype="float64")
    real = execute.client_part
    calls: list[int] = []

    def short(*arguments: Any) -> Any:
        answers = real(*arguments)
        calls.append(len(answers.loss))
        if len(answers.loss) > 3:
            raise torch.cuda.OutOfMemoryError("pretended")
        return answers

    monkeypatch.setattr(execute, "client_part", short)
    split = run("cuda", algorithm="scaffold", dtype="float64", chunk=6)
    assert calls[:3] == [6, 3, 3]
    assert split.records[-1]["gradients"] == whole.records[-1]["gradients"]
    for n, tensor in whole.model.items():
        torch.testing.assert_close(split.model[n], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime"])
def test_packed_runs_agree_with_the_cpu(name: str, replay: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from undrift import packs
    from undrift.config import from_mapping

    runs = [
        {"algorithm": name, "dtype": "float64", "seed": seed, "set": {"lr": lr}, "replay": replay}
        for seed, lr in ((0, 0.1), (1, 0.05), (2, 0.2))
    ]
    folders = [tmp_path / str(each["seed"]) for each in runs]
    configs = [from_mapping(QUICK | {"device": "cuda"} | each) for each in runs]
    assert packs.most_at_once(configs[0], 1) >= 3 and len({packs.kind(c, RunFolder(tmp_path)) for c in configs}) == 1
    packs.run_packed(configs, folders, [lambda record, rounds: None] * 3)
    for each, folder in zip(runs, folders, strict=True):
        found = load_file(folder / "model.safetensors")
        for n, tensor in run("cpu", **each).model.items():
            torch.testing.assert_close(found[n], tensor, rtol=1e-9, atol=1e-9)
