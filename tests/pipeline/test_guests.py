"""DSP in other people's loops: inputs of several parts, logits for every position, shared tables, short batches, clipping."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.pipeline.guest_cases import (
    CASES,
    FLUSH,
    STEPS,
    WORDS,
    Embedding,
    Head,
    Layer,
    build,
    factor,
    language_model,
    outcome,
    sgd,
    texts,
)  # fmt: skip
from tests.simulate.test_ranks import finished, torchrun
from undrift.core.errors import BadSetting
from undrift.pipeline import DSP
from undrift.pipeline.batch import decode, encode, read

alone = functools.cache(outcome)


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def loss_of(batch: Any, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("case", ["bp", "bp clip"])
def test_without_staleness_a_shared_table_is_backpropagation_s(case: str) -> None:
    """One update a batch with the sum of both gradients, and the whole gradient's length bounded as PyTorch does it."""
    model = language_model(wrapped=False)
    optimizer, clipped = sgd([*model.parameters()]), 0
    for n, batch in enumerate(texts()):
        optimizer.param_groups[0]["lr"] = 0.3 * factor(n)
        optimizer.zero_grad()
        h = model[1:](model[0](batch["ids"], batch["mask"]))
        loss_of(batch, h).backward()
        clip = CASES[case].get("clip", float("inf"))
        clipped += int(nn.utils.clip_grad_norm_(model.parameters(), clip) > clip)
        optimizer.step()
    assert apart(alone(case)["model"], model.state_dict()) < 1e-12
    assert clipped > 3 or case == "bp"


def gradients(model: nn.Sequential, batch: Any, x: list[dict[str, Tensor]], back: list[dict[str, Tensor]]) -> list[Any]:
    """Eq. (1-6) for three blocks: inputs of the blocks under the parameters x[k], replays under back[k]."""
    blocks = [model[:1], model[1:2], model[2:]]
    weights = [{name: w.clone().requires_grad_() for name, w in back[k].items()} for k in range(3)]

    def run(k: int, w: dict[str, Tensor], h: Any) -> Tensor:
        if k == 0:
            own = {name.removeprefix("0."): t for name, t in w.items()}
            return functional_call(blocks[0][0], own, (batch["ids"], batch["mask"]))
        return functional_call(blocks[k], w, (h,))

    with torch.no_grad():
        h1 = run(0, x[0], None)
        h2 = run(1, x[1], h1)
    h1, h2 = h1.requires_grad_(), h2.requires_grad_()
    *top, error = torch.autograd.grad(loss_of(batch, run(2, weights[2], h2)), [*weights[2].values(), h2])
    *middle, error = torch.autograd.grad(run(1, weights[1], h1), [*weights[1].values(), h1], error)
    bottom = torch.autograd.grad(run(0, weights[0], None), [*weights[0].values()], error)
    return [dict(zip(w, g, strict=True)) for w, g in zip(weights, (bottom, middle, top), strict=True)]


@pytest.mark.parametrize("case", ["dsp", "clip", "not tied"])
def test_stale_blocks_are_written_out(case: str) -> None:
    """Every version of the parameters is kept. The table's update for a batch comes with the first block's, in its timestamp."""
    tied, clip = CASES[case].get("tied", True), CASES[case].get("clip", 0.0)
    model, forward, back = language_model(tied, wrapped=False), (0, 1, 2), (4, 3, 2)  # F_k and F_k + m_k
    whole = {name: w.detach().clone() for name, w in model.named_parameters()}  # one name for a shared table
    velocity, t0, clipped = dict[str, Tensor](), 0, 0

    def of_block(k: int, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Block k's parameters; the last one has the layers 2 and 3."""
        names = {n: n for n in x} | ({"3.out.weight": "0.words.weight"} if tied else {})
        return {name: x[source] for name, source in names.items() if min(int(name[0]), 2) == k}

    for part in (texts()[: FLUSH + 1], texts()[FLUSH + 1 :]):  # the queues are emptied in between
        versions = [dict(whole)]
        kept: dict[int, list[Any]] = {}
        for t in range(len(part) + 4):
            update: dict[str, tuple[Tensor, int]] = {}
            for k in range(3):
                n = t - back[k]
                if 0 <= n < len(part):
                    if (
                        n not in kept
                    ):  # all gradients of a batch, with those versions that are there when they are needed
                        kept[n] = []
                    x = [of_block(j, versions[min(n + forward[j], t)]) for j in range(3)]
                    y = [of_block(j, versions[min(n + back[j], t)]) for j in range(3)]
                    found = gradients(model, part[n], x, y)[k]
                    for name, g in found.items():
                        full = "0.words.weight" if tied and name == "3.out.weight" else name
                        if tied and full == "0.words.weight":
                            kept[n].append(g)
                            if k == 0:
                                update[full] = kept[n][0] + kept[n][1], n
                        else:
                            update[full] = g, n
            length = float(sum(g.square().sum() for g, _ in update.values())) ** 0.5
            clipped += bool(clip) and length > clip
            share = min(1.0, clip / (length + 1e-6)) if clip else 1.0
            after = dict(versions[-1])
            for name, (g, n) in update.items():
                step = share * g + 1e-2 * after[name]
                velocity[name] = 0.8 * velocity[name] + step if name in velocity else step
                after[name] = after[name] - 0.3 * factor(t0 + n) * velocity[name]
            versions.append(after)
        whole, t0 = versions[-1], t0 + len(part)
    expected = whole | ({"3.out.weight": whole["0.words.weight"]} if tied else {})
    assert apart(alone(case)["model"], expected) < 1e-11
    assert clipped > 3 or not clip
    assert apart(alone(case)["model"], {n: w.detach() for n, w in language_model(tied).state_dict().items()}) > 0.01


def test_processes_equal_one_process_bit_for_bit(tmp_path: Path) -> None:
    """With short batches, inputs of two parts, logits in an object, a table in two processes, and a stop half way."""
    code, _, err = finished(torchrun(3, "tests.pipeline.guest_cases", str(tmp_path / "found")))
    assert code == 0, err
    first, *_, last = (torch.load(f"{tmp_path / 'found'}.{rank}") for rank in range(3))
    for case in CASES:
        for name in ("stopped", "state", "model"):
            mine, theirs = alone(case)[name], first[case][name]
            assert mine.keys() == theirs.keys(), (case, name)
            for key, tensor in mine.items():
                assert torch.equal(tensor, theirs[key]), (case, name, key)
        assert first[case]["scores"] == alone(case)["scores"]
        assert [x is None for x in last[case]["losses"]] == [x is None for x in alone(case)["losses"]]
        pairs = [(a, b) for a, b in zip(last[case]["losses"], alone(case)["losses"], strict=True) if a is not None]
        assert len(pairs) == STEPS and all(torch.equal(a, b) for a, b in pairs)


def test_losses_and_scores_are_means_over_labels() -> None:
    """Of a model that does not move, against PyTorch on all batches at once."""
    still = DSP(language_model(), cuts=[1, 2], optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    data = texts(4)
    found, model = still.evaluate(data), language_model(wrapped=False).requires_grad_(False)
    logits = torch.cat([model[1:](model[0](b["ids"], b["mask"])) for b in data]).flatten(0, 1)
    labels = torch.cat([b["labels"] for b in data]).flatten()
    right = (logits.argmax(1) == labels)[labels != -100].double().mean()
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-12)
    assert found["accuracy"] == pytest.approx(float(right), rel=1e-12)
    losses = [loss for loss in (still.step(data[0]), *still.flush()) if loss is not None]
    one = model[1:](model[0](data[0]["ids"], data[0]["mask"]))
    assert float(losses[0]) == pytest.approx(float(loss_of(data[0], one)), rel=1e-12)


def test_a_tuple_is_a_mapping_without_names() -> None:
    runs = [build("dsp") for _ in range(2)]
    for run, form in zip(runs, ("mapping", "tuple"), strict=True):
        for batch in texts(7, form):
            run.step(batch)
        run.flush()
    assert apart(runs[0].model_state(), runs[1].model_state()) == 0.0
    _, _, pieces = read(texts(1)[0])
    assert decode(encode(pieces)) == pieces and [piece.name for piece in pieces] == ["ids", "mask"]


class Pair(nn.Module):
    def forward(self, h: Tensor) -> Any:
        return h, h


ids = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((ids, ids, ids), r"a batch is \(inputs, targets\).*not a tuple of 3"),
        ({"ids": ids}, "or a mapping with 'labels'"),
        (ids, "not a Tensor of 2"),
        ((ids, ids[:1]), "inputs of a batch has 2 rows, and targets 1"),
        (({"ids": ids, "mask": None}, ids), "mask of a batch must be a tensor, not a NoneType"),
    ],
)
def test_batches_that_cannot_be_read_are_refused(batch: Any, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        build("dsp").step(batch)


def test_what_cannot_be_trained_in_blocks_is_refused() -> None:
    run = build("dsp")
    run.step(texts(1)[0])
    with pytest.raises(
        BadSetting, match=r"all batches need the same inputs: one tensor came after ids \[5\] and mask \[5\]"
    ):
        run.step((ids, ids))
    middle = nn.Sequential(Embedding(), Layer(), Layer(), Head(False)).double()
    middle[2].up.weight = middle[1].up.weight
    with pytest.raises(BadSetting, match="the first and the last block may share parameters"):
        DSP(middle, cuts=[1, 2], optimizer=sgd)
    with pytest.raises(BadSetting, match="layer 2 shares a tensor"):
        DSP([middle[0], middle[1], nn.Sequential(middle[2], middle[3])], optimizer=sgd)
    handed = DSP(nn.Sequential(Embedding(), Pair(), Layer(), Head(False)).double(), cuts=[2], optimizer=sgd)
    with pytest.raises(BadSetting, match="hands a tuple on to the next one"):
        handed.step(texts(1)[0])
    with pytest.raises(BadSetting, match="clip must be a number of at least 0"):
        DSP(language_model(), cuts=[1, 2], optimizer=sgd, clip=-1.0)
    assert WORDS == 11
