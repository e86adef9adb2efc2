"""All models of a personal run, and what it takes to use them, as the run's folder keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from undrift.simulate.personal_scores import Scored, personal_models


class Models(NamedTuple):
    """State dicts under `global.`, `client1.`, ..., `selector.`, and facts about them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def models(run: Scored, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Models:
    """The server's model, everybody's own and the selector."""
    net, state, alg, data = run.net, run.state, run.alg, run.data
    tensors = {f"global.{name}": tensor for name, tensor in net.state_dict(state.x, state.buffers).items()}
    for number, served in enumerate(personal_models(run), 1):
        tensors |= {f"client{number}.{name}": tensor for name, tensor in net.state_dict(*served).items()}
    if alg.chooses:
        selector = net.networks["selector"].state_dict(*alg.selector(state.companion))
        tensors |= {f"selector.{name}": tensor for name, tensor in selector.items()}
    gammas = [r["gamma"] for r in records if r.get("gamma") is not None]
    networks = alg.networks(data.clients)
    facts = {
        "algorithm": settings["algorithm"], "dataset": settings["dataset"], "model": settings["model"],
        "shape": list(data.shape), "outputs": data.classes, "clients": data.clients, "chooses": alg.chooses,
        "gamma": gammas[-1] if gammas else max(float(getattr(alg, "gamma", 0.0)), 0.0),
        "selector_model": networks["selector"][0] if networks else "",
        "selector_outputs": networks["selector"][1] if networks else 0,
        "masks": data.masks, "mean": list(data.transform.mean), "std": list(data.transform.std),
        "sites": list(data.site_names) or [f"client {n + 1}" for n in range(data.clients)],
    }  # fmt: skip
    return Models(tensors, facts)
