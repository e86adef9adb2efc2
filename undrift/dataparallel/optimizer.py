"""Compressed data-parallel training as a torch.optim.Optimizer: DEF, DEFAdamW, EF, SAEF, PSync, EF21 and EF21SGDM.

Each rank computes the gradients of its own batch. `step()` exchanges a block of numbers instead of all and moves the
parameters to the point of the next gradient, which is not the model itself: see `evaluating`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrift.compress import gaps, make_compressor, overlaps, skip
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName
from undrift.dataparallel import ef, ef21, ef21_sgdm, psync, saef
from undrift.dataparallel.def_ import Detached, GroupRates
from undrift.dataparallel.def_adamw import DetachedAdamW
from undrift.dataparallel.flat import Flat
from undrift.dataparallel.own_gradients import keep_gradients, keep_gradients_of_active
from undrift.dataparallel.sgd import SGDMethod
from undrift.dataparallel.workers import Ranks

EVAL = "eval()"
POINTS = {"def": "y", "def-a": "x"}  # the names of `evaluating`


class CompressedOptimizer(torch.optim.Optimizer):
    """The base of the optimisers, each of which names its method."""

    method: Detached | SGDMethod
    flat: Flat  # the parameters, complete after the base class's constructor

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        ratio: float = 64,
        compressor: str = "rbgs",
        block: str = "flat",
        seed: int = 0,
        *,
        params: Iterable[Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.build(model, rates, ratio, compressor, block, seed, params, group)

    def build(
        self,
        model: nn.Module | Iterable[Any],
        rates: dict[str, Any],
        ratio: float,
        compressor: str,
        block: str,
        seed: int,
        params: Iterable[Any] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Set everything up; `rates` are the defaults of the parameter groups."""
        for name, value in rates.items():
            if name != "betas" and not 0.0 <= value < float("inf"):
                raise BadSetting(f"{name} must be a number of at least 0, not {value}")
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model
        torch.optim.Optimizer.__init__(self, params, dict(rates))
        self.workers = Ranks(group)
        names = {id(p): n for n, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
        self.flat = Flat.from_parameters([p for g in self.param_groups for p in g["params"]])
        self.compressor = make_compressor(compressor, block, ratio, seed, [p.numel() for p in self.flat.params])
        self.method.check(self.compressor)
        settings = {"ratio": ratio, "compressor": compressor, "block": block, "seed": seed}
        tensors = {
            f"the model's tensor {n}": f"{names.get(id(p), 'parameter')} {list(p.shape)} {p.dtype}"
            for n, p in enumerate(self.flat.params)
        }
        self.workers.agree({"the method": type(self).__name__} | settings | asdict(self.method) | rates | tensors)
        parts = model.modules() if isinstance(model, nn.Module) else ()  # torch.compile may have wrapped DDP
        wrapped = [part for part in parts if isinstance(part, DistributedDataParallel)]
        for part in wrapped:
            keep_gradients(part)
        self.search: Any = (
            None  # until the first step, a hook that looks for a DDP in which a framework wraps the model
        )
        if isinstance(model, nn.Module) and not wrapped and self.workers.count > 1:
            self.search = model.register_forward_pre_hook(keep_gradients_of_active)
        self.t = 0  # iterations so far
        self.compared = False  # whether the ranks know that they are at the same iteration
        self.shown = ""  # the weights that the parameters hold inside `evaluating` and after `eval`
        self.means: dict[str, Tensor] = {}  # after `eval`, the means over the ranks of the vectors that differ
        self.vectors: Any = self.method.start(torch.zeros_like(self.flat.scratch), self.workers)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start all ranks from rank 0's parameters."""
        self.flat.read(self.vectors.x)
        self.workers.copy_from_first(self.vectors.x)
        self.flat.write(self.vectors.x)

    def settle(self) -> None:
        """Agree with the other ranks before a step or an evaluation, in case something was loaded."""
        if not self.compared:  # ranks at different steps would exchange different blocks
            self.workers.agree({"the step to go on from": self.t})
            self.compared = True
        if self.t == 0:
            self.begin()  # the model may be loaded after the optimizer is made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "flat"):
            raise BadSetting("parameters cannot be added later: their errors are one vector; make a new optimizer")
        super().add_param_group(param_group)

    @property
    def rates(self) -> list[GroupRates]:
        """The current rates of the parameter groups, as stretches of the vectors."""
        rates, begin = [], 0
        for g in self.param_groups:
            end = begin + sum(p.numel() for p in g["params"])
            rates.append(self.group_rates(g, slice(begin, end)))
            begin = end
        return rates

    def group_rates(self, g: dict[str, Any], part: slice) -> GroupRates:
        return GroupRates(part, float(g["lr"]), float(g["momentum"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One iteration with the gradients that the parameters hold."""
        if self.shown:
            raise BadSetting(
                "step() would train the weights to evaluate; leave `with evaluating()`, or call train() after eval()"
            )
        if Ranks(self.workers.group).count != self.workers.count:
            raise BadSetting("the process group was made after the optimizer; call init_process_group before it")
        self.settle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [float(g["weight_decay"]) for g in self.param_groups for _ in g["params"]]
        g = self.flat.gradients([0.0] * len(decays) if self.method.decoupled else decays)
        if self.t == 0:
            self.check_own_gradients(g)
            if self.search is not None:
                self.search.remove()
        moved: list[slice] = []  # stretches of the parameters that are at the next point already

        def move_early(stretches: Sequence[slice]) -> None:
            self.move_to_point(stretches)
            moved.extend(stretches)

        early = move_early if self.flat.direct else skip
        self.method.step(self.vectors, g, self.rates, self.t, self.compressor, self.workers, early)
        self.t += 1
        self.move_to_point(list(gaps(moved, len(g))))
        return loss

    def check_own_gradients(self, g: Tensor) -> None:
        """Refuse gradients that are the same on all ranks: nothing would be saved."""
        if self.workers.count > 1:
            first, *others = self.workers.everybody([float(v) for v in (g.double().norm(), g.double().sum())])
            if first[0] > 0 and all(other == first for other in others):
                raise BadSetting(
                    "all ranks have the same gradients in the first step: something else, such as DDP, has averaged them, "
                    "so everything was sent; make the optimizer from the DDP module, or leave out DDP (if all ranks "
                    "were given the same samples: give them different ones)"
                )

    def move_to_point(self, stretches: Sequence[slice] | None = None) -> None:
        """Move the parameters, or some stretches of them, to the point of the next gradient."""
        if self.flat.direct:  # in one pass over memory
            for part, p in self.flat.stretches():
                for s in [part] if stretches is None else overlaps(part, stretches):
                    out = p.view(-1)[s.start - part.start : s.stop - part.start]
                    self.method.point(self.vectors, out, s)
        else:
            self.flat.write(self.method.point(self.vectors, self.flat.scratch))

    @contextlib.contextmanager
    def evaluating(self, which: str = "") -> Iterator[None]:
        """Make the parameters the model to test or save: "def" (y = x - mean e) or "def-a" (x), else the method's own.

        All ranks must enter together: y takes an exchange of d numbers. On exit the parameters are restored exactly.
        """
        if which and which not in POINTS:
            raise UnknownName("name of the weights", which, POINTS)
        if self.shown:
            raise BadSetting(f"the parameters are those of {self.shown} already")
        self.settle()
        with torch.no_grad():
            self.flat.write(self.method.model(self.vectors, self.workers, POINTS.get(which, "")))
        self.shown = f"evaluating({which!r})" if which else "evaluating()"
        try:
            yield
        finally:
            self.shown = ""
            with torch.no_grad():
                self.move_to_point()

    def eval(self) -> None:
        """Make the parameters the model to test and save until `train()`; all ranks must call it.

        A `state_dict()` made in between, also on one rank alone, has the means of the ranks' vectors: all can go on from it.
        """
        if self.shown == EVAL:
            return
        if self.shown:
            raise BadSetting(f"the parameters are those of {self.shown} already")
        self.settle()
        with torch.no_grad():
            self.means = {name: self.workers.mean(getattr(self.vectors, name).clone()) for name in self.method.own}
            self.flat.write(self.method.model(self.vectors, self.workers))
        self.shown = EVAL

    def train(self) -> None:
        """Put the parameters back where gradients are taken, after `eval()`."""
        if self.shown == EVAL:
            self.shown, self.means = "", {}
            with torch.no_grad():
                self.move_to_point()

    # In checkpoints the vectors that differ between ranks carry the rank in their names.
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank. Save it on every rank, or `whole_state_dict()` on one, or this on one after `eval()`."""
        if self.means:
            return self._join_state({f"{name}/mean": mean.clone() for name, mean in self.means.items()})
        own = {f"{name}/rank{self.workers.rank}": getattr(self.vectors, name).clone() for name in self.method.own}
        return self._join_state(own)

    def whole_state_dict(self) -> dict[str, Any]:
        """The state of all ranks, for any number of ranks; all must call it, one may save it."""
        self.settle()
        own: dict[str, Tensor] = {}
        for name in self.method.own:
            rows = self.workers.all_rows(getattr(self.vectors, name))
            own |= {f"{name}/rank{rank}": row.clone() for rank, row in enumerate(rows)}
        return self._join_state(own)

    def _join_state(self, own: dict[str, Tensor]) -> dict[str, Any]:
        if self.t == 0:
            self.flat.read(self.vectors.x)  # the model may be loaded after the optimizer is made
        shared = {n: v.clone() for n, v in self.vectors._asdict().items() if n not in self.method.own}
        facts = {"method": type(self).__name__, "step": self.t, "ranks": self.workers.count}
        return {"state": facts | shared | own, "param_groups": super().state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit on as many ranks; on another number every rank gets the mean of the
        errors and momenta, which keeps y. This sets the parameters, so load the model before it, if at all."""
        state = state_dict["state"]
        if state.get("method") != type(self).__name__:
            raise BadRunFolder(f"the checkpoint is of {state.get('method')}, not of {type(self).__name__}")
        before, now = int(state["ranks"]), self.workers.count
        places = {}
        for name, vector in self.vectors._asdict().items():
            keys = [name]
            if name in self.method.own and f"{name}/mean" in state:
                keys = [f"{name}/mean"]
            elif name in self.method.own:
                keys = [f"{name}/rank{r}" for r in (range(before) if before != now else [self.workers.rank])]
            places[name] = keys
            missing = [key for key in keys if key not in state]
            if missing:
                raise BadRunFolder(
                    f"the checkpoint was made by {before} ranks and lacks {missing[0]}; to go on with {now}, save "
                    "state_dict() on every rank and load its own file there, or save whole_state_dict(), or call eval() on "
                    "all ranks before one saves"
                )
            if state[keys[0]].shape != vector.shape:
                raise BadRunFolder(f"the stored {name} is {list(state[keys[0]].shape)}, not {list(vector.shape)}")
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for name, keys in places.items():  # only now: a refused checkpoint changes nothing
            vector = getattr(self.vectors, name)
            vector.copy_(state[keys[0]] if len(keys) == 1 else sum(state[key].to(vector) for key in keys) / before)
        if before != now and self.workers.rank == 0:
            warnings.warn(
                f"the checkpoint was made by {before} ranks, now there are {now}: every rank goes on with the mean of "
                "errors and momenta, which keeps y = x - mean e",
                stacklevel=3,  # past no_grad
            )
        self.t, self.compared, self.shown, self.means = int(state["step"]), False, "", {}
        self.move_to_point()


class DEF(CompressedOptimizer):
    """Detached error feedback (undrift/dataparallel/def_.py).

    `model` is a module, plain or wrapped in DistributedDataParallel, or parameters as torch.optim takes them; `params`
    are groups of the model's parameters. A step sends about 2/ratio of the model. `lam` is the weight of the error
    where gradients are taken, or "auto". `compressor` is leader, rbgs, randk or topk; `block` is flat (one block of
    the whole vector), tensor (one of each tensor) or shuffle (of rbgs: each block once in `ratio` steps). The thesis has
    lam=0.3 and compressor="rbgs".

    >>> model = nn.Linear(4, 2)
    >>> optimizer = DEF(model, lr=0.1, momentum=0.9, ratio=4)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        ratio: float = 64,
        lam: float | str = "auto",
        compressor: str = "leader",
        block: str = "flat",
        seed: int = 0,
        *,
        params: Iterable[Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.method = Detached(lam, "y")
        super().__init__(model, lr, momentum, weight_decay, ratio, compressor, block, seed, params=params, group=group)


class DEFAdamW(CompressedOptimizer):
    """DEF around AdamW (undrift/dataparallel/def_adamw.py): each rank makes AdamW's step from its own gradients.

    `betas`, `eps` and `weight_decay` are torch.optim.AdamW's, the rest is DEF's.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = DEFAdamW(model, lr=1e-3, ratio=4)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        ratio: float = 64,
        lam: float | str = "auto",
        compressor: str = "leader",
        block: str = "flat",
        seed: int = 0,
        *,
        params: Iterable[Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise BadSetting(f"betas must be two numbers of at least 0 and less than 1, not {betas}")
        self.method = DetachedAdamW(lam, "y")
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.build(model, rates, ratio, compressor, block, seed, params, group)

    @property
    def rates(self) -> list[GroupRates]:
        """Parameters without a gradient have stretches of their own: their weights do not decay."""
        rates: list[GroupRates] = []
        for g in self.param_groups:
            for p in g["params"]:
                rate = self.group_rates(g, slice(0, p.numel()))
                rates.append(rate if p.grad is not None else rate._replace(decay=0.0))
        return join_neighbours(rates)

    def group_rates(self, g: dict[str, Any], part: slice) -> GroupRates:
        beta1, beta2 = g["betas"]
        return GroupRates(part, float(g["lr"]), beta1, beta2, float(g["eps"]), float(g["weight_decay"]))


def join_neighbours(rates: Iterable[GroupRates]) -> list[GroupRates]:
    """Stretches one behind the other, each given by its length; neighbours with the same rates become one.

    >>> rates = [GroupRates(slice(0, 2), 0.1, 0.9), GroupRates(slice(0, 3), 0.1, 0.9), GroupRates(slice(0, 1), 0.2, 0.9)]
    >>> for rate in join_neighbours(rates):
    ...     print(rate.part, rate.lr)
    slice(0, 5, None) 0.1
    slice(5, 6, None) 0.2
    """
    found: list[GroupRates] = []
    for rate in rates:
        begin = found[-1].part.stop if found else 0
        if found and found[-1][1:] == rate[1:]:
            found[-1] = rate._replace(part=slice(found[-1].part.start, begin + rate.part.stop))
        else:
            found.append(rate._replace(part=slice(begin, begin + rate.part.stop)))
    return found


class EF(CompressedOptimizer):
    """Error feedback (undrift/dataparallel/ef.py): DEF with lambda = 0; its model is x."""

    method = ef.METHOD


class SAEF(CompressedOptimizer):
    """Step-ahead error feedback, unaveraged (undrift/dataparallel/saef.py): DEF with lambda = 1; its model is x."""

    method = saef.METHOD


class PSync(CompressedOptimizer):
    """Partial synchronisation of local models (undrift/dataparallel/psync.py): DEF with lambda = 1; its model is y."""

    method = psync.METHOD


class EF21(CompressedOptimizer):
    """EF21 (undrift/dataparallel/ef21.py): the first step sends the whole gradient."""

    method = ef21.METHOD


class EF21SGDM(CompressedOptimizer):
    """EF21-SGDM (undrift/dataparallel/ef21_sgdm.py): EF21 on each rank's momentum; the first step sends the whole gradient."""

    method = ef21_sgdm.METHOD
