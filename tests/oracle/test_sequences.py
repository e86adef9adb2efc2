"""Sequences: what models return, labels for every position, and dropout that a model calls as a function."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.small import CPU, path, simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.core.errors import BadSetting
from undrift.data.federation import Federation, federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.oracle.layers import Context, DropoutInFunctions, attention_weights
from undrift.oracle.losses import IGNORED
from undrift.oracle.net import Net
from undrift.simulate import evaluate
from undrift.simulate.evaluate import accuracy, means, sample_scores, weights_of
from undrift.simulate.whole_metrics import Bits, Perplexity

VOCABULARY, T = 7, 5


class Attention(nn.Module):
    """A model of sequences with attention; `how` says what it returns and where it drops entries."""

    def __init__(self, how: str = "tensor", p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.p = how, p
        self.table, self.qkv, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 12), nn.Linear(4, VOCABULARY)
        self.multi = nn.MultiheadAttention(4, 2, dropout=p, batch_first=True) if how == "module" else None

    def forward(self, x: Tensor) -> Any:
        h = self.table(x)
        p = self.p if self.training else 0.0
        if self.multi is not None:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            h = self.multi(h, h, h, attn_mask=causal, need_weights=False)[0]
        else:
            q, k, v = self.qkv(h).chunk(3, -1)
            h = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            h = F.dropout(h, p, self.training)
        logits = self.head(h)
        returned = {
            "mapping": {"loss": None, "logits": logits},
            "object": SimpleNamespace(logits=logits),
            "first": logits.mT,
        }
        return returned.get(self.how, logits)


def texts(ignored: bool = False) -> Federation:
    random = np.random.default_rng(0)
    clients = []
    for n in (6, 9, 4):
        x = random.integers(0, VOCABULARY, (n, T + 1))
        y = x[:, 1:].copy()
        if ignored:
            y[random.random(y.shape) < 0.4] = IGNORED
        clients.append((x[:, :-1], y))
    return federate(dataset_from((clients, clients[0])), "sites", 3, 0, CPU)


def run(module: nn.Module, fed: Federation | None = None, **settings: Any) -> Tensor:
    alg = FedAvg(lr=0.5, optimizer="momentum")
    return path(simulation(alg, module, fed or texts(), batch=4, cohort=2, **settings), 2)


@pytest.mark.parametrize("how", ["mapping", "object", "first"])
def test_logits_may_be_returned_in_several_ways(how: str) -> None:
    assert torch.equal(run(Attention(how)), run(Attention()))


def test_a_round_is_a_plain_loop_with_losses_weighted_by_tokens() -> None:
    fed = texts(ignored=True)
    found = simulation(FedAvg(lr=0.5), Attention(), fed, cohort=3, steps=1, batch=20)
    module = Attention().double()
    rows = []
    for n in range(3):
        ids = fed.members[fed.start[n] : fed.start[n] + fed.sizes[n]]
        out = module(fed.train.take(ids))
        loss = F.cross_entropy(out.flatten(0, 1), fed.train.targets[ids].flatten(), ignore_index=IGNORED)
        used = [p for p in module.parameters() if p.requires_grad]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, used)]))
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert (path(found, 1)[0] - (before - 0.5 * torch.stack(rows).mean(0))).norm() < 1e-12 * before.norm()


@pytest.mark.parametrize("most", [1 << 25, VOCABULARY * T * 2])
def test_scores_are_means_over_tokens_in_batches_of_any_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MOST_OUTPUTS", most)
    fed, net = texts(ignored=True), Net(Attention(), dtype=torch.float64)
    seen = []
    whole = {
        "perplexity": Perplexity(),
        "bits": Bits(),
        "accuracy": accuracy,
        "count": lambda o, t: seen.append(len(o)) or 0.0,
    }
    rows = torch.arange(len(fed.test.targets))
    scores = sample_scores(net, *net.start(), fed.test, fed.transform, whole, rows)
    found = means(scores, weights_of(net, fed.test, rows))
    logits, labels = Attention().double()(fed.test.take(rows)).detach().flatten(0, 1), fed.test.targets.flatten()
    loss = float(F.cross_entropy(logits, labels, ignore_index=IGNORED))
    expected = {"loss": loss, "perplexity": math.exp(loss), "bits": loss / math.log(2)}
    expected["accuracy"] = float((logits.argmax(1) == labels)[labels != IGNORED].double().mean())
    assert {n: found[n] for n in expected} == pytest.approx(expected, rel=1e-6)  # float32
    assert max(seen) == (6 if most > 1000 else 2)


@pytest.mark.filterwarnings("ignore:the model's outputs do not depend on 2 of its parameters .qkv")
@pytest.mark.parametrize("how", ["tensor", "module"])
def test_dropout_inside_attention_comes_from_the_streams(how: str) -> None:
    """The same alone and stacked, whatever PyTorch's own generator says; and it is dropped."""
    torch.manual_seed(1)
    stacked = run(Attention(how, p=0.3))
    torch.manual_seed(2)
    alone = run(Attention(how, p=0.3), execution="debug")
    assert (stacked - alone).norm() < 1e-12 * alone.norm()
    assert (stacked - run(Attention(how))).norm() > 1e-3 * stacked.norm()
    assert not torch.equal(stacked, run(Attention(how, p=0.3), seed=1))


def test_half_of_the_attention_is_dropped_and_the_rest_doubled() -> None:
    net = Net(Attention(p=0.5), dtype=torch.float64)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 40, 6, 4).unbind()
    with DropoutInFunctions(net.current, Context(None, torch.tensor(3))):
        net.current.drops = 0
        dropped = F.scaled_dot_product_attention(q, k, torch.eye(6).expand(40, 6, 6), dropout_p=0.5)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    share = attention_weights(q, k, None, False)
    torch.testing.assert_close(share @ v, F.scaled_dot_product_attention(q, k, v))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * share[kept])
    assert 0.45 < kept.double().mean() < 0.55


class Masked(nn.Module):
    """Attention with two masks, of truth values or of numbers."""

    def __init__(self, attention: nn.MultiheadAttention, hidden: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.attention, self.hidden, self.mask = attention, hidden, mask

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, key_padding_mask=self.hidden, attn_mask=self.mask)[0]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("truth", [True, False])
def test_multihead_attention_without_dropout_is_pytorchs(first: bool, truth: bool) -> None:
    """The form with dropout, at a dropout that drops next to nothing, against PyTorch's own."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=first)
    nn.init.normal_(attention.in_proj_bias)
    x, (rows, length) = torch.randn(3, 5, 4), (3, 5) if first else (5, 3)
    hidden = torch.zeros(rows, length, dtype=torch.bool)
    hidden[1:, -1] = True
    mask = torch.ones(length, length, dtype=torch.bool).triu(1) if truth else torch.randn(length, length)
    if not truth:
        hidden = torch.zeros(rows, length).masked_fill(hidden, -torch.inf)
    expected = Masked(attention, hidden, mask)(x)
    attention.dropout = 1e-12
    net = Net(Masked(attention, hidden, mask))
    found, _ = net(*net.start(), x, Context(None, torch.tensor(0)))
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_read_is_refused() -> None:
    class Other(nn.Module):
        def __init__(self, returned: Any) -> None:
            super().__init__()
            self.layer, self.returned = nn.Linear(2, 2), returned

        def forward(self, x: Tensor) -> Any:
            return self.returned(self.layer(x))

    for returned, said in ((lambda h: (h, h), "a tuple"), (lambda h: OrderedDict(scores=h), "of scores")):
        net = Net(Other(returned))
        with pytest.raises(BadSetting, match=f"must return one tensor.*{said}"):
            net(*net.start(), torch.zeros(1, 2), None)
    net = Net(Attention())
    with pytest.raises(BadSetting, match="may be \\[B, T, V\\] or \\[B, V, T\\]"):
        net.sample_losses(torch.zeros(2, 5, 5), torch.zeros(2, 5).long())
    always = Other(lambda h: F.dropout(h, 0.5))
    net = Net(always)
    with pytest.raises(BadSetting, match="training=self.training"):
        net(*net.start(), torch.zeros(1, 2), None)


class Layered(nn.Module):
    """Layers with batch norm, dropout as a layer, as a function and inside attention; what is checkpointed is computed again."""

    blocks = ("table", "first", "second", "head")

    def __init__(self, how: str = "", p: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
        self.first, self.second = Middle(how, p), Middle(how, p)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(self.table(x))))


class Middle(nn.Module):
    def __init__(self, how: str, p: float) -> None:
        super().__init__()
        self.how, self.p, self.calls = how, p, 0
        self.qkv, self.norm, self.drop = nn.Linear(4, 12), nn.BatchNorm1d(4), nn.Dropout(p)

    def forward(self, h: Tensor) -> Tensor:
        if self.how in ("reentrant", "other"):
            return checkpoint(self.compute, h, use_reentrant=self.how == "reentrant")
        if self.how == "nested":
            return checkpoint(lambda h: checkpoint(self.compute, h, use_reentrant=False), h, use_reentrant=False)
        return self.compute(h)

    def compute(self, h: Tensor) -> Tensor:
        self.calls += 1
        p = self.p if self.training else 0.0
        q, k, v = self.qkv(self.drop(h)).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return h + F.dropout(self.norm(seen.mT).mT, p, self.training)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # in evaluation
@pytest.mark.parametrize(
    ("name", "how"),
    [("fedavg", "reentrant"), ("fedavg", "other"), ("fedavg", "nested"), ("fedmlb", "other"), ("moon", "reentrant")],
)
def test_checkpoints_compute_the_same_again(name: str, how: str) -> None:
    """Bit for bit, with masks, statistics and padding; MOON and FedMLB ask at several points before they differentiate."""
    alg = algorithm_class(name)(lr=0.1)

    def after(how: str, **settings: Any) -> tuple[Tensor, Tensor]:
        found = simulation(alg, Layered(how), texts(ignored=True), batch=4, cohort=2, steps=2, **settings)
        return path(found, 2), found.state.buffers

    plain, again = after("", execution="debug"), after(how, execution="debug")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    if how == "other" and name == "fedavg":
        assert all(torch.equal(a, b) for a, b in zip(again, after(how, execution="auto"), strict=True)), (
            "clients in turn"
        )


def test_what_is_checkpointed_is_computed_again_and_kept_nowhere() -> None:
    calls, saved = {}, {}
    for how in ("", "other"):
        net = Net(Layered(how), dtype=torch.float64)
        x, buffers = net.start()
        x.requires_grad_()
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=packed: kept.append(t) or t, lambda t: t):
            outputs, _ = net(x, buffers, torch.zeros(2, T, dtype=torch.int64), Context(None, torch.tensor(3)))
        outputs.sum().backward()
        calls[how], saved[how] = net.module(True).first.calls, len(packed)  # type: ignore[union-attr]
        assert net.checkpoints == (how == "other") and x.grad is not None and x.grad.norm() > 0
    assert calls == {"": 1, "other": 2} and saved["other"] < saved[""] / 2


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_outside_of_passes_are_pytorchs(reentrant: bool) -> None:
    with pytest.raises(BadSetting, match="stacked clients cannot compute activations again.*--execution pool"):
        run(Layered("reentrant" if reentrant else "other"), execution="stacked")
    assert run(Attention()).isfinite().all()
    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=reentrant).backward()
    assert x.grad is not None and x.grad.item() == pytest.approx(math.e)
