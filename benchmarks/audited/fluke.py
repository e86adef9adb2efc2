"""fluke's algorithms: its own loop with its own clients and servers, which are handed our cohorts and samples."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fluke import FlukeENV
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.server import Server as FlukeServer
from fluke.utils import FederationObserver
from torch import Tensor, nn

from audited.problem import (
    BODY,
    CLASSES,
    CLIENTS,
    LR,
    MODEL,
    OWN,
    SIZES,
    STEPS,
    Batch,
    Course,
    Local,
    Path,
    Row,
    Rows,
    Run,
    Server,
    State,
    average,
    course,
    descend,
    gradient,
    network,
    ours,
    plain,
    played,
    problem,
    scaffold,
    vector,
)

PACKAGE = "fluke-fl"


def net(norm: int = 0) -> EncoderHeadNet:
    class Net(EncoderHeadNet):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    return Net(*network(norm))


def whole_vector(model: nn.Module) -> Tensor:
    return vector(model)


def theirs(
    module: str,
    names: str,
    course: Course,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    own: Callable[[Client], nn.Module] | None = None,
    model: Callable[[FlukeServer], nn.Module] = lambda server: server.model,
    shared: Callable[[Tensor], Tensor] = lambda x: x,
    norm: int = 0,
    body: bool = False,
) -> Run:
    """Run a method of fluke. `own` says which of a client's models is compared; `body`: the server has the body alone."""

    def run() -> Path:
        FlukeENV().set_device("cpu")
        FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
        torch.manual_seed(0)
        code = importlib.import_module(f"fluke.algorithms.{module}")
        kind = getattr(code, names)
        takes_model = importlib.import_module("fluke.algorithms").PersonalizedFL in kind.__mro__ or names == "FedRep"
        blank = object.__new__(kind)
        settings = {"name": blank.get_optimizer_class(), "lr": LR} | (optimizer or {})
        start = net(norm)
        loaders = [
            FastDataLoader(
                x, y, num_labels=CLASSES, batch_size=min(course.batch, len(y)), shuffle=False, skip_singleton=False
            )
            for x, y in problem()
        ]
        clients = [
            blank.get_client_class()(
                index=i, train_set=loader, test_set=None, loss_fn=nn.CrossEntropyLoss(),
                optimizer_cfg=OptimizerConfigurator(dict(settings)),
                **({"model": copy.deepcopy(start)} if takes_model else {}),
                **{"local_epochs": course.passes} | (client or {}),
            )
            for i, loader in enumerate(loaders)
        ]  # fmt: skip
        host = blank.get_server_class()(
            model=start.encoder if body else start, test_set=None, clients=clients, **(server or {})
        )
        federation = kind(CLIENTS, None, {}, clients, host)
        models, owns = [], []

        def chosen(share: float) -> Sequence[Client]:
            round = course.rounds[len(models)]
            for i, samples in round.items():
                loaders[i].tensors = list(samples)
            return [clients[i] for i in sorted(round)]

        class Watch(FederationObserver):  # type: ignore[misc]
            def end_round(self, *_: object, **__: object) -> None:
                models.append(shared(vector(model(host))))
                if own is not None:
                    owns.append(torch.stack([vector(own(one)) for one in clients]))

        host.get_eligible_clients = chosen
        federation.set_callbacks(Watch())
        federation.run(len(course.rounds), 1.0)
        return {MODEL: torch.stack(models)} | ({OWN: torch.stack(owns)} if owns else {})

    return run


# Faults, in the papers' letters.
def first_round_lost(beta: float) -> Server:
    def step(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        if t == 0:
            return x
        memory["m"] = beta * memory.get("m", 0.0) + x - average(memory, t, x, models, cohort)
        return x - memory["m"]

    return step


def models_by_steps(course: Course) -> Server:
    """FedNova's weights w_i = p_i tau_eff / tau_i, which do not add up to one, on the models instead of the updates."""

    def step(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        tau = [float(len(course.steps(t, i))) for i in cohort]
        mean = sum(tau) / len(tau)
        return sum(mean / n / len(tau) * y for n, y in zip(tau, models, strict=True))  # type: ignore[return-value]

    return step


def feddyn(alpha: float) -> tuple[Local, Server]:
    """FedDyn with +alpha_i <g_i, x> for -<g_i, x>, and the models' mean + mean g_i for their mean - h / alpha.

    alpha_i = alpha n / (N n_i) is that of the authors' code. A client that comes for the first time starts at the models' mean.
    """

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        mine = alpha * sum(SIZES) / CLIENTS / SIZES[i]
        x = x if i in memory else memory.get("mean", x)
        g = memory.get(i, torch.zeros_like(x))
        y = descend(x, batches, lambda y: mine * (y - x + g))
        memory[i] = g + mine * (x - y)
        return y

    def server(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        memory["mean"] = torch.stack(models).mean(0)
        return memory["mean"] + torch.stack([memory[i] for i in cohort]).mean(0)

    return local, server


def stale_ascent(rho: float) -> Local:
    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        last = memory.get(i, torch.zeros_like(x))
        for batch in batches:
            up = last + gradient(x, batch)
            last = gradient(x + rho * up / (up.norm() + 1e-12), batch)
            x = x - LR * last
        memory[i] = last
        return x

    return local


def no_return(alpha: float, beta: float, free: bool) -> Local:
    """Per-FedAvg whose meta step starts from the adapted model."""

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        for batch in batches:
            x = x - alpha * gradient(x, batch)
            r = gradient(x, batch)
            if free:
                r = r - alpha * (gradient(x + 1e-3 * r, batch) - gradient(x - 1e-3 * r, batch)) / 2e-3
            x = x - beta * r
        return x

    return local


def no_envelope(inner: int) -> Local:
    """theta takes plain steps, and is sent in place of w."""

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        return descend(x, [batch for batch in batches for _ in range(inner)])

    return local


def mixing(beta: float) -> Server:
    return lambda memory, t, x, models, cohort: (1 - beta) * x + beta * torch.stack(models).mean(0)


def only_mixed(course: Course, lam: float) -> Path:
    """APFL without the personal step: v <- lam v + (1 - lam) x_i^K after each round."""
    v, owns, memory = {i: vector(network()) for i in range(CLIENTS)}, [], dict[Any, Any]()

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        y = plain(memory, x, i, batches)
        v[i] = lam * v[i] + (1 - lam) * y
        return y

    def server(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        owns.append(torch.stack([v[i] for i in range(CLIENTS)]))
        return average(memory, t, x, models, cohort)

    del memory
    return played(course, local, server) | {OWN: torch.stack(owns)}


def rows() -> Rows:
    some, all_of, full = course(), course(everybody=True, whole=True), course(whole=True)

    def us(name: str, on: Course = some, weights: str = "uniform", own: Any = None, **fields: Any) -> Run:
        return lambda: ours(name, fields, on, weights, own)

    def body(x: Tensor) -> Tensor:
        return x[:BODY]

    def us_body(name: str, own: bool = True, **fields: Any) -> Run:
        heads = (lambda client: client.v) if own else None
        return lambda: ours(name, fields, all_of, own=heads, shared=body, kept=lambda x: x[BODY:])

    yield Row("FedAvg", theirs("fedavg", "FedAVG", some), us("fedavg"))
    by_size = {"weighted": True}
    yield Row("FedAvg, weighted", theirs("fedavg", "FedAVG", some, server=by_size), us("fedavg", weights="size"))
    yield Row("FedProx", theirs("fedprox", "FedProx", some, {"mu": 1.0}), us("fedprox", mu=1.0))
    yield Row(
        "FedAvgM", theirs("fedavgm", "FedAVGM", some, server={"momentum": 0.6, "weighted": False}), us("fedavgm", beta1=0.6),
        faults={"the first round's answers are thrown away: the momentum is set to zero in that round, not updated":
                lambda: played(some, server=first_round_lost(0.6))},
        line="fluke/algorithms/fedavgm.py: if self.momentum_vector is None: ... else:",
    )  # fmt: skip
    opt = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "weighted": False}
    field = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99}
    for mode in ("adam", "yogi", "adagrad"):
        yield Row(
            f"FedOpt, {mode}", theirs("fedopt", "FedOpt", some, server=opt | {"mode": mode}),
            us(f"fed{mode}", **field, tau=1e-3),
            faults={"the server's rate eta scales the change before the moments see it, too, so that tau acts as tau / eta":
                    us(f"fed{mode}", **field, tau=1e-2)},
            line="fluke/algorithms/fedopt.py: super().aggregate(...), which mixes with self.hyper_params.lr",
        )  # fmt: skip
    yield Row("FedExP", theirs("fedexp", "FedExP", some), us("fedexp", eps=1e-4))
    yield Row(
        "FedNova", theirs("fednova", "FedNova", some), us("fednova"),
        faults={"weights that do not add up to one are put on the models, not on the updates": lambda: played(
            some, server=models_by_steps(some))},
        line="fluke/algorithms/fednova.py: aggregate_models(self.model, client_models, weights, ...)",
        note="equal where all clients take equally many steps",
    )  # fmt: skip
    plain_mean = {"weighted": False}
    yield Row("SCAFFOLD", theirs("scaffold", "SCAFFOLD", some, server=plain_mean), us("scaffold"))
    yield Row("SCAFFOLD, weighted", theirs("scaffold", "SCAFFOLD", some), us("scaffold", weights="size"))
    yield Row(
        "SCAFFOLD, global_step 0.5", theirs("scaffold", "SCAFFOLD", some, server=plain_mean | {"global_step": 0.5}),
        us("scaffold", server_lr=0.5),
        faults={"eta_g multiplies the mean of the models, not of the updates":
                lambda: played(some, *scaffold(step=lambda x, mean: 0.5 * mean))},
        line="fluke/algorithms/scaffold.py: weights[c] = self.hyper_params.global_step * weights[c]",
    )  # fmt: skip
    yield Row(
        "FedDyn",
        theirs("feddyn", "FedDyn", some, {"alpha": 0.5, "clipping": 0}, plain_mean, model=lambda server: server.cld_mdl),
        us("feddyn", alpha=0.5),
        faults={"the client's linear term has the other sign, and alpha twice; the server adds the mean g_i of the cohort":
                lambda: played(some, *feddyn(0.5))},
        line="fluke/algorithms/feddyn.py: penalty = ..., load_all_params(... + avg_grad)",
    )  # fmt: skip
    yield Row(
        "FedSAM", theirs("fedsam", "FedSAM", some, {"rho": 0.05}), us("fedsam", radius=0.05),
        faults={"the way up is along the new gradient plus the last step's, which is still in .grad":
                lambda: played(some, stale_ascent(0.05))},
        line="fluke/algorithms/fedsam.py: SAMOptimizer.step: no zero_grad() before loss1 = closure()",
    )  # fmt: skip
    yield Row("MOON", theirs("moon", "MOON", some, {"mu": 1.0, "tau": 0.5}), us("moon", mu=1.0, temperature=0.5))
    for mode in ("FO", "HF"):
        yield Row(
            f"Per-FedAvg, {mode}",
            theirs("per_fedavg", "PerFedAVG", full, {"mode": mode, "beta": LR}, optimizer={"lr": 0.05}),
            us("per-fedavg", full, alpha=0.05, split=False, hessian_free=mode == "HF"),
            faults={"the meta step starts from the adapted model w - alpha g, not from w":
                    lambda mode=mode: played(full, no_return(0.05, LR, mode == "HF"))},
            line="fluke/algorithms/per_fedavg.py: the first self.optimizer.step() is not taken back",
        )  # fmt: skip
    yield Row(
        "pFedMe",
        theirs("pfedme", "PFedMe", full, {"k": 2}, {"beta": 0.5}, {"lamda": 2.0, "mu": 0.0}),
        us("pfedme", full, lam=2.0, inner_lr=LR, inner_steps=2, server_lr=0.5),
        faults={"theta is pulled to itself, so that lambda does nothing, and is sent for w: FedAvg with k times the steps":
                lambda: played(full, no_envelope(2), mixing(0.5))},
        line="fluke/algorithms/pfedme.py: self.optimizer.step(self.model.parameters())",
    )  # fmt: skip
    yield Row(
        "APFL", theirs("apfl", "APFL", all_of, {"lam": 0.4}, own=lambda client: client.personalized_model),
        us("apfl", all_of, own=lambda client: client.own.x, lam=0.4, keep_moments=False),
        faults={"the personal model gets no gradient; after a round it is replaced by the mixture":
                lambda: only_mixed(all_of, 0.4)},
        line="fluke/algorithms/apfl.py: merge_models(...) copies, and local_loss.backward() ends in the copy",
        note="the server's model is equal",
    )  # fmt: skip
    yield Row(
        "Ditto", theirs("ditto", "Ditto", all_of, {"lam": 0.5, "tau": STEPS}, own=lambda client: client.personalized_model),
        us("ditto", all_of, own=lambda client: client.own.x, lam=0.5),
    )  # fmt: skip

    def head(client: Client) -> nn.Module:
        model = client.model
        return model.get_local() if hasattr(model, "get_local") else model.head

    yield Row("FedPer", theirs("fedper", "FedPer", all_of, own=head, body=True), us_body("fedper"))
    yield Row(
        "FedRep", theirs("fedrep", "FedRep", all_of, {"local_epochs": 2, "tau": 1}, own=head, body=True),
        us_body("fedrep", head_steps=2),
    )  # fmt: skip
    yield Row(
        "FedBABU", theirs("fedbabu", "FedBABU", all_of, {"mode": "full", "fine_tuning_epochs": 0}, body=True),
        us_body("fedbabu", own=False, begin=10**6),
    )  # fmt: skip
    yield from normalised(all_of)


def normalised(all_of: Course) -> Rows:
    """FedBN: the layers that are shared, and every client's model."""
    for norm in (1, 2):
        layer = [p.numel() for p in network(norm).parameters()]

        def shared(x: Tensor, layer: list[int] = layer) -> Tensor:
            parts = x.split(layer)
            return torch.cat([*parts[:2], *parts[4:]])

        def as_averaged(norm: int = norm, shared: Any = shared) -> Path:
            """FedAvg whose parameters of the layer are not kept, as far as the server's model goes."""
            return ours("fedavg", {}, all_of, shared=shared, norm=norm)

        yield Row(
            f"FedBN, a layer {norm + 1} levels deep", theirs("fedbn", "FedBN", all_of, shared=shared, norm=norm),
            lambda norm=norm, shared=shared: ours("fedbn", {}, all_of, shared=shared, norm=norm),
            faults={"a normalisation layer deeper than two levels is not found, and is shared as in FedAvg": as_averaged},
            line="fluke/algorithms/fedbn.py: self._get_bn_keys(value, running_key=key + '.') drops running_key",
        )  # fmt: skip
