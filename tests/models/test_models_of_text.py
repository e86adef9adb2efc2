"""Models of text: equal to PyTorch's own layers, causal, the same stacked and alone, and of the size that they say."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from undrift.core.errors import BadSetting
from undrift.models import bag_of_words, gpt, lstm

T, V = 12, 17
IDS = torch.randint(0, V, (3, T), generator=torch.Generator().manual_seed(0))


def small(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"gpt": dict(depth=2, width=16, heads=4), "lstm": dict(depth=2, width=10, table=5)}[kind]
    return {"gpt": gpt, "lstm": lstm}[kind].build((T,), V, **(sizes | options)).double()


def spread(model: nn.Module) -> nn.Module:
    """The model with weights that are not small."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def theirs(model: Any, ids: Tensor) -> Tensor:
    """The same network made of nn.TransformerEncoderLayer."""
    h = model.embedding.tokens.weight[ids] + model.embedding.places.weight[:T]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    for name in ("layer1", "layer2"):
        own = getattr(model, name)
        layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True).double()
        pairs = {"in_proj_": own.qkv, "out_proj.": own.mix}
        given = {
            f"self_attn.{n}{kind}": getattr(part, kind) for n, part in pairs.items() for kind in ("weight", "bias")
        }
        rest = {"linear1": own.up, "linear2": own.down, "norm1": own.norm1, "norm2": own.norm2}
        given |= {f"{n}.{kind}": getattr(part, kind) for n, part in rest.items() for kind in ("weight", "bias")}
        layer.load_state_dict(given)
        h = layer(h, src_mask=hidden)
    out: Tensor = model.head.norm(h) @ model.head.out.weight.T
    return out


def test_gpt_is_pytorchs_layers() -> None:
    model = spread(small("gpt"))
    assert (model(IDS) - theirs(model, IDS)).norm() < 1e-12 * model(IDS).norm()


def test_lstm_is_pytorchs() -> None:
    model: Any = spread(small("lstm"))
    other = nn.LSTM(5, 10, 2, batch_first=True).double()
    layers = {0: model.lstm1, 1: model.lstm2}
    given = {f"{kind}_ih_l{n}": getattr(layer.into, kind) for n, layer in layers.items() for kind in ("weight", "bias")}
    given |= {
        f"{kind}_hh_l{n}": getattr(layer.across, kind) for n, layer in layers.items() for kind in ("weight", "bias")
    }
    other.load_state_dict(given)
    expected = model.head(other(model.embedding(IDS))[0])
    assert (model(IDS) - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_later_tokens_change_nothing(kind: str) -> None:
    model, other = spread(small(kind)), IDS.clone()
    other[:, 7:] = (other[:, 7:] + 1) % V
    a, b = model(IDS), model(other)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=1e-12, atol=1e-12)
    assert (a[:, 7:] - b[:, 7:]).abs().amin((0, 2)).min() > 0


@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_stacked_models_are_the_models(kind: str) -> None:
    models: list[nn.Module] = [spread(copy.deepcopy(small(kind))) for _ in range(2)]
    parameters, _ = stack_module_state(models)
    together = vmap(lambda p, ids: functional_call(models[0], p, (ids,)))(parameters, torch.stack([IDS, IDS.flip(0)]))
    apart = torch.stack([models[0](IDS), models[1](IDS.flip(0))])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_and_tied_tables(tied: bool) -> None:
    model: Any = small("gpt", tied=tied, context=20)
    each = 12 * 16 * 16 + 13 * 16  # qkv, mix, up, down with their biases, and two norms
    assert sum(p.numel() for p in model.parameters()) == V * 16 * (1 if tied else 2) + 20 * 16 + 2 * each + 2 * 16
    assert (model.head.out.weight is model.embedding.tokens.weight) == tied
    assert [name for name, _ in model.named_children()] == ["embedding", "layer1", "layer2", "head"]
    rows = 5 * V + sum(4 * 10 * (n + 10 + 2) for n in (5, 10)) + 11 * V
    assert sum(p.numel() for p in small("lstm").parameters()) == rows


def test_the_first_loss_is_that_of_chance() -> None:
    # Not the inputs, which a tied table knows.
    targets = torch.randint(0, V, IDS.shape, generator=torch.Generator().manual_seed(1))
    for kind in ("gpt", "lstm"):
        loss = nn.functional.cross_entropy(small(kind)(IDS).flatten(0, 1), targets.flatten()).item()
        assert abs(loss - math.log(V)) < 0.15


def test_a_bag_of_words_knows_no_order() -> None:
    torch.manual_seed(0)
    model = bag_of_words.build((T,), 4, words=V, width=8)
    torch.testing.assert_close(model(IDS), model(IDS.flip(1)))
    torch.testing.assert_close(model(IDS), model(IDS + V))
    assert model(IDS).shape == (3, 4) and (model(IDS)[0] - model(IDS)[1]).norm() > 0


@pytest.mark.parametrize(
    ("build", "options", "why"),
    [
        (gpt.build, dict(width=10, heads=3), "a width that heads divides"),
        (gpt.build, dict(depth=0), "depth >= 1"),
        (gpt.build, dict(dropout=1.0), "dropout in"),
        (lstm.build, dict(table=0), "at least 1"),
        (bag_of_words.build, dict(words=0), "at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(build: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSetting, match=why):
        build((T,), V, **options)
    with pytest.raises(BadSetting, match=r"needs sequences of tokens \[length\], not \[1, 8, 8\]"):
        build((1, 8, 8), V)


def test_sequences_longer_than_the_context_are_refused() -> None:
    with pytest.raises(BadSetting, match="a context of 6 tokens, not 12"):
        small("gpt", context=6)(IDS)
