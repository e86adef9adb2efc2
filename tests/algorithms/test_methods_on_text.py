"""Every method on sequences: it runs on a small gpt, and what compares probabilities does so for each token that counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import undrift
from tests.small import ADAPTERS, CPU, Adapted, path, simulation
from undrift.algorithms.fedmlb import FedMLB
from undrift.algorithms.moon import MOON
from undrift.core.errors import BadSetting
from undrift.core.names import names
from undrift.data import synthetic_text
from undrift.data._text import CLASSES
from undrift.data.federation import Federation, federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.models import gpt
from undrift.oracle.losses import IGNORED
from undrift.oracle.net import Net

T, V = 4, 6


def texts() -> Federation:
    return federate(synthetic_text.load(None, roles=3, lines=12, length=10), "sites", 3, 0, CPU)


def small_gpt(adapters: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = gpt.build((10,), CLASSES, depth=1, width=4, heads=2)
    if adapters:
        model.requires_grad_(False).get_submodule("layer1").register_module("qkv", Adapted(4, 12))
    return model


SELECTED = ("fedsm", "fedsm-extra", "ensemble")  # tested below


@pytest.mark.parametrize("name", [name for name in names("algorithms") if name not in SELECTED])
def test_every_method_learns_text_alone_and_stacked(name: str) -> None:
    kind, fed = algorithm_class(name), texts()
    own = {field.name for field in dataclasses.fields(kind)}
    alg = kind(lr=0.05, **({"slots": 0} if "slots" in own else {}))
    settings: dict[str, Any] = dict(cohort=1 if name == "centralized" else 2, steps=2, batch=3)
    stacked, alone = (
        simulation(alg, small_gpt(name in ADAPTERS), fed, execution=e, **settings) for e in ("stacked", "debug")
    )
    points = path(stacked, 2)
    assert points.isfinite().all() and (path(alone, 2) - points).norm() <= 1e-12 * points.norm()
    start = stacked.net.without_padding(stacked.net.start()[0], "model")
    assert name in ("local", "fedrep") or (points[-1] - start).norm() > 1e-6 * start.norm()


def sequences(flat: bool) -> Federation:
    """Two clients' tokens with labels, some of which do not count; `flat`: every token that counts is a sample."""
    random = np.random.default_rng(3)
    clients: list[Any] = []
    for n in (5, 5):
        x, y = random.integers(0, V, (n, T)), random.integers(0, V + 1, (n, T))
        y[random.random(y.shape) < 0.3] = IGNORED
        clients.append((x[y != IGNORED], y[y != IGNORED]) if flat else (x, y))
    return federate(dataset_from((clients, clients[0])), "sites", 2, 0, CPU)


def token_by_token() -> nn.Module:
    """A model that sees one token at a time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, V + 1))


@pytest.mark.parametrize("name", ["fedavg", "fedmlb", "fedmlbm", "fedntd"])
@pytest.mark.parametrize("execution", ["stacked", "debug"])
def test_a_model_of_single_tokens_is_trained_as_on_single_tokens(name: str, execution: str) -> None:
    """Whole clients as batches, so that the same labels are in them; what does not count changes nothing."""
    settings: dict[str, Any] = dict(cohort=2, steps=3, batch=30, execution=execution)
    alg = algorithm_class(name)(lr=0.5)
    together, apart = (
        path(simulation(alg, token_by_token(), sequences(flat), **settings), 2) for flat in (False, True)
    )
    assert (together - apart).norm() < 1e-12 * apart.norm()
    plain = path(simulation(algorithm_class("fedavg")(lr=0.5), token_by_token(), sequences(True), **settings), 2)
    assert name == "fedavg" or (together - plain).norm() > 1e-4 * plain.norm()


def test_a_mixture_of_one_model_has_its_loss() -> None:
    net = Net(small_gpt(), dtype=torch.float64)
    fed = texts()
    ids = torch.arange(5)
    outputs, _ = net(*net.start(), fed.train.take(ids).long(), None)
    targets = fed.train.targets[ids]
    assert outputs.shape == (5, 10, CLASSES)
    mixed = net.mixed_losses(net.probabilities(outputs, targets), targets)
    torch.testing.assert_close(mixed, net.sample_losses(outputs, targets), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SELECTED)
def test_a_selector_learns_who_writes(name: str) -> None:
    """Alone and stacked the same; after some rounds it tells more writers than chance does."""
    settings: dict[str, Any] = dict(
        dataset="synthetic-text(roles=3, lines=40, length=24, own=1.0)", model="gpt(depth=1, width=8, heads=2)", clients=3,
        cohort=3, partition="sites", rounds=8, steps=4, batch=8, dtype="float64",
    )  # fmt: skip
    own = {"begin": 4} if name != "fedsm" else {"selector_mode": "per_batch", "gamma": 0.4}
    given = dict(lr=0.02, optimizer="adamw", selector_model="bag-of-words", selector_lr=0.03) | own
    runs = [undrift.run(algorithm=name, set=given, execution=e, **settings) for e in ("stacked", "debug")]
    for key, tensor in runs[0].model.items():
        torch.testing.assert_close(runs[1].model[key], tensor, rtol=1e-9, atol=1e-9)
    chosen = np.array(runs[0].records[-1]["sites"]["chosen"]["test"], float)
    assert chosen.shape == (3, 4) and chosen.sum() > 0
    if name == "fedsm":
        assert np.trace(chosen[:, 1:]) > 0.5 * chosen.sum()


class Named(nn.Module):
    """The same network as a Sequential, whose parts have names."""

    blocks: tuple[str, ...] = ("table", "inner.middle", "out")

    def __init__(self, twisted: bool = False) -> None:
        super().__init__()
        self.twisted = twisted
        sequential: Any = token_by_token()
        self.inner = nn.ModuleDict({"middle": sequential[1]})
        self.table, self.out = sequential[0], sequential[2]

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner["middle"](self.table(ids)))
        return out * 2 if self.twisted else out


@pytest.mark.parametrize("kind", [MOON, FedMLB])
def test_blocks_may_be_named_by_any_module(kind: Any) -> None:
    settings: dict[str, Any] = dict(cohort=2, steps=2, batch=4)
    runs = [simulation(kind(lr=0.3), module, sequences(False), **settings) for module in (Named(), token_by_token())]
    states = []
    for run in runs:
        path(run, 2)
        states.append(list(run.net.state_dict(run.state.x, run.state.buffers).values()))
    by_shape = [sorted(state, key=lambda t: tuple(t.shape)) for state in states]
    for mine, theirs in zip(*by_shape, strict=True):
        assert torch.equal(mine, theirs)


def test_blocks_that_are_not_the_model_are_refused() -> None:
    with pytest.raises(
        BadSetting, match=r"blocks \(table, inner.middle, out\), one after another, do not give its outputs"
    ):
        simulation(FedMLB(), Named(twisted=True), sequences(False), cohort=2).round()

    class Without(Named):
        blocks = ()

    with pytest.raises(BadSetting, match="or a module whose attribute `blocks` names such parts, not Without"):
        simulation(FedMLB(), Without(), sequences(False), cohort=2).round()


def test_probabilities_of_classes_need_class_labels() -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((12, 4)).astype(np.float32), random.standard_normal(12).astype(np.float32)
    fed = federate(dataset_from(([(x, y)], (x, y))), "sites", 1, 0, CPU)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1), nn.Flatten(0))
    for name in ("fedmlb", "fedntd"):
        run = simulation(algorithm_class(name)(), model, fed, cohort=1)
        run.net.loss = nn.functional.mse_loss
        with pytest.raises(BadSetting, match="compares the probabilities of classes, so it needs class labels"):
            run.round()
