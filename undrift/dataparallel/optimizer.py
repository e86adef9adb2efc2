"""Compressed data-parallel training as a torch.optim.Optimizer: DEF, EF, SAEF, PSync and EF21.

Each rank computes the gradients of its own batch; `step()` exchanges a block of numbers instead of all and leaves the
parameters where the method takes its next gradient. The model itself is not where they stand then: see `evaluating`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from undrift.compress import between, common, make_compressor
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName
from undrift.dataparallel import ef, ef21, psync, saef
from undrift.dataparallel.agree import agree
from undrift.dataparallel.def_ import Detached, Rates
from undrift.dataparallel.ef21 import EF21Method
from undrift.dataparallel.workers import Ranks

POINTS = {"def": "y", "def-a": "x"}  # the names of `evaluating`


class CompressedOptimizer(torch.optim.Optimizer):
    """What the five optimisers have in common; use one of them."""

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        method: Detached | EF21Method,
        rates: dict[str, float],
        *,
        ratio: float,
        compressor: str,
        block: str,
        seed: int,
        params: Iterable[Any] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        for name, lowest in (("lr", 0.0), ("momentum", 0.0), ("weight_decay", 0.0)):
            if not lowest <= rates[name] < float("inf"):
                raise BadSetting(f"{name} must be a number of at least {lowest:g}, not {rates[name]}")
        self.flat: Flat | None = None
        super().__init__(given_parameters(model) if params is None else params, dict(rates))
        self.workers = Ranks(group)
        self.method = method
        names = {id(p): n for n, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
        self.flat = Flat.of([p for g in self.param_groups for p in g["params"]])
        self.compressor = make_compressor(compressor, block, ratio, seed, [p.numel() for p in self.flat.params])
        method.check(self.compressor)
        agree(
            self.workers,
            {"the method": type(self).__name__, "ratio": ratio, "compressor": compressor, "block": block, "seed": seed}
            | asdict(method)
            | rates
            | {
                f"the model's tensor {n}": f"{names.get(id(p), 'parameter')} {list(p.shape)} {p.dtype}"
                for n, p in enumerate(self.flat.params)
            },
        )
        for part in model.modules() if isinstance(model, nn.Module) else ():  # torch.compile may have wrapped DDP
            if isinstance(part, DistributedDataParallel) and (keep_local, None) not in part._comm_hooks:
                part.register_comm_hook(None, keep_local)  # only one is allowed: another optimizer's is this one
        self.t = 0  # iterations so far
        self.compared = False  # whether the ranks know that they are at the same iteration
        self.shown = ""  # which weights the parameters hold inside `evaluating`
        self.vectors = method.start(self.flat.empty(), self.workers)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start from rank 0's parameters, on all ranks."""
        assert self.flat is not None
        self.flat.read(self.vectors.x)
        self.workers.from_first(self.vectors.x)
        self.flat.write(self.vectors.x)

    def settle(self) -> None:
        """What all ranks do before they step or show the model, in case something was loaded on the way."""
        if not self.compared:  # ranks at different steps would exchange different blocks
            agree(self.workers, {"the step to go on from": self.t})
            self.compared = True
        if self.t == 0:
            self.begin()  # a model that was loaded after the optimizer was made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.flat is not None:
            raise BadSetting(
                "parameters cannot be added later, because their errors are one vector; make a new optimizer"
            )
        super().add_param_group(param_group)

    @property
    def rates(self) -> list[Rates]:
        """The parameter groups as stretches of the vectors, with their rates of now."""
        found, begin = [], 0
        for g in self.param_groups:
            end = begin + sum(p.numel() for p in g["params"])
            found.append(Rates(slice(begin, end), float(g["lr"]), float(g["momentum"])))
            begin = end
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One iteration from the gradients that the parameters hold."""
        assert self.flat is not None
        if self.shown:
            raise BadSetting("step() inside evaluating() would train other weights; leave the with block first")
        if Ranks(self.workers.group).count != self.workers.count:
            raise BadSetting("the process group was made after the optimizer; call init_process_group before it")
        self.settle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        g = self.flat.gradients([float(g["weight_decay"]) for g in self.param_groups for _ in g["params"]])
        there: list[slice] = []  # stretches of the parameters that are at the next point already

        def meanwhile(stretches: Sequence[slice]) -> None:
            self.to_point(stretches)
            there.extend(stretches)

        early = meanwhile if self.flat.direct else None
        self.method.step(self.vectors, g, self.rates, self.t, self.compressor, self.workers, early)  # type: ignore[arg-type]
        self.t += 1
        self.to_point(list(between(there, len(g))))
        return loss

    def to_point(self, stretches: Sequence[slice] | None = None) -> None:
        """The parameters, or some stretches of them, at the point where the next gradient is taken."""
        assert self.flat is not None
        if self.flat.direct:  # in one pass over memory
            for part, p in self.flat.stretches():
                for s in [part] if stretches is None else common(part, stretches):
                    out = p.view(-1)[s.start - part.start : s.stop - part.start]
                    self.method.point(self.vectors, out, s)  # type: ignore[arg-type]
        else:
            self.flat.write(self.method.point(self.vectors, self.flat.scratch))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def evaluating(self, which: str = "") -> Iterator[None]:
        """The parameters as the model to test or to save: "def" (y = x - mean e) or "def-a" (x), by default the method's own.

        All ranks must enter it together, because y takes one exchange of d numbers. Afterwards the parameters are what they
        were, bit for bit.
        """
        if which and which not in POINTS:
            raise UnknownName("name of the weights", which, POINTS)
        if self.shown:
            raise BadSetting(f"the parameters are those of evaluating({self.shown!r}) already")
        assert self.flat is not None
        self.settle()
        with torch.no_grad():
            self.flat.write(self.method.returned(self.vectors, self.workers, POINTS.get(which, "")))  # type: ignore[arg-type]
        self.shown = which or "its own"
        try:
            yield
        finally:
            self.shown = ""
            with torch.no_grad():
                self.to_point()

    # Checkpoints: what a rank has for itself carries the rank in its name.
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank. Save it on every rank, or `whole_state_dict()` on one."""
        own = {f"{name}/rank{self.workers.rank}": getattr(self.vectors, name).clone() for name in self.method.own}
        return self._with_state(own)

    def whole_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one; all ranks must call it, one may save it. It can be loaded on any number of ranks."""
        self.settle()
        own: dict[str, Tensor] = {}
        for name in self.method.own:
            rows = self.workers.all_rows(getattr(self.vectors, name))
            own |= {f"{name}/rank{rank}": row.clone() for rank, row in enumerate(rows)}
        return self._with_state(own)

    def _with_state(self, own: dict[str, Tensor]) -> dict[str, Any]:
        assert self.flat is not None
        if self.t == 0:
            self.flat.read(self.vectors.x)  # a model that was loaded after the optimizer was made
        shared = {n: v.clone() for n, v in self.vectors._asdict().items() if n not in self.method.own}
        facts = {"method": type(self).__name__, "step": self.t, "ranks": self.workers.count}
        return {"state": facts | shared | own, "param_groups": super().state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit on as many ranks; on another number every rank gets the mean of their
        errors and momenta, which keeps y. Load the model before, if at all: this sets the parameters."""
        state = state_dict["state"]
        if state.get("method") != type(self).__name__:
            raise BadRunFolder(f"the checkpoint is of {state.get('method')}, not of {type(self).__name__}")
        before, now = int(state["ranks"]), self.workers.count
        places = {}
        for name, vector in self.vectors._asdict().items():
            keys = [name]
            if name in self.method.own:
                keys = [f"{name}/rank{r}" for r in (range(before) if before != now else [self.workers.rank])]
            places[name] = keys
            missing = [key for key in keys if key not in state]
            if missing:
                raise BadRunFolder(
                    f"the checkpoint was made by {before} ranks and lacks {missing[0]}; to go on with {now}, save "
                    "whole_state_dict(), or on every rank load its own file"
                )
            if state[keys[0]].shape != vector.shape:
                raise BadRunFolder(
                    f"{name} is {list(state[keys[0]].shape)} in the checkpoint, not {list(vector.shape)}"
                )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for name, keys in places.items():  # only now, so that what is refused changes nothing
            vector = getattr(self.vectors, name)
            vector.copy_(state[keys[0]] if len(keys) == 1 else sum(state[key].to(vector) for key in keys) / before)
        if before != now and self.workers.rank == 0:
            warnings.warn(
                f"the checkpoint was made by {before} ranks, now there are {now}: every rank goes on with the mean of their "
                "errors and momenta, which keeps y = x - mean e",
                stacklevel=3,  # past no_grad
            )
        self.t, self.compared = int(state["step"]), False
        self.to_point()


@dataclass
class Flat:
    """The parameters as one vector, group after group, and a vector of that length to work in."""

    params: list[nn.Parameter]
    scratch: Tensor

    @classmethod
    def of(cls, params: list[nn.Parameter]) -> Flat:
        devices = {p.device for p in params}
        if len(devices) > 1:
            raise BadSetting(
                f"the parameters lie on several devices ({', '.join(map(str, devices))}); move them to one"
            )
        if any(p.is_complex() for p in params):
            raise BadSetting(
                "a parameter is complex; give its real and imaginary parts as parameters (torch.view_as_real)"
            )
        wide = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        return cls(params, torch.zeros(sum(p.numel() for p in params), dtype=wide, device=params[0].device))

    @property
    def direct(self) -> bool:
        """Whether a vector's stretches can be computed where the parameters lie; on a GPU that is many small kernels."""
        like = self.scratch.dtype
        return self.scratch.device.type == "cpu" and all(p.is_contiguous() and p.dtype == like for p in self.params)

    def stretches(self) -> Iterator[tuple[slice, Tensor]]:
        """Where each parameter lies in the vectors."""
        begin = 0
        for p in self.params:
            yield slice(begin, begin + p.numel()), p.detach()
            begin += p.numel()

    def empty(self) -> Tensor:
        return torch.zeros_like(self.scratch)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The vector's stretches in the shapes of the parameters."""
        pieces = vector.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def read(self, vector: Tensor) -> None:
        torch._foreach_copy_(self.parts(vector), [p.detach() for p in self.params])

    def write(self, vector: Tensor) -> None:
        torch._foreach_copy_([p.detach() for p in self.params], self.parts(vector))

    def gradients(self, decays: list[float]) -> Tensor:
        """The gradients with weight decay at the parameters as they are; a parameter without a gradient counts as zero."""
        triples = zip(self.parts(self.scratch), self.params, decays, strict=True)
        there = [(part, p.grad, p.detach(), decay) for part, p, decay in triples if p.grad is not None]
        if any(grad.is_sparse for _, grad, _, _ in there):
            raise BadSetting("a gradient is sparse; use layers with sparse=False")
        if len(there) < len(self.params):
            self.scratch.zero_()
        if there:
            torch._foreach_copy_([part for part, _, _, _ in there], [grad for _, grad, _, _ in there])
        for decay in {row[3] for row in there} - {0.0}:
            same = [row for row in there if row[3] == decay]
            torch._foreach_add_([row[0] for row in same], [row[2] for row in same], alpha=decay)
        return self.scratch


def given_parameters(model: nn.Module | Iterable[Any]) -> Iterable[Any]:
    """The trainable parameters of a module; anything else is what torch.optim takes."""
    return [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model


def keep_local(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP that leaves every rank its own gradients."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# torch reads the hook's annotations, which `from __future__ import annotations` has turned into text.
keep_local.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


class DEF(CompressedOptimizer):
    """Detached error feedback (undrift/dp/def_.py).

    `model` is a module, plain or wrapped in DistributedDataParallel, or parameters as torch.optim takes them; `params`
    are parameter groups of the model's parameters. Each rank sends about 2/ratio of the model a step. `lam` is the
    weight of the error where gradients are taken, or "auto"; `compressor` rbgs, randk or topk; `block` flat (one block of
    the whole vector), tensor (one of each tensor) or shuffle (each block once in `ratio` steps).

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
        lam: float | str = 0.3,
        compressor: str = "rbgs",
        block: str = "flat",
        seed: int = 0,
        *,
        params: Iterable[Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model, Detached(lam, "y"), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            ratio=ratio, compressor=compressor, block=block, seed=seed, params=params, group=group,
        )  # fmt: skip


class _Fixed(CompressedOptimizer):
    """An optimiser without a lambda of its own."""

    fixed: Detached | EF21Method

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
        super().__init__(
            model, self.fixed, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            ratio=ratio, compressor=compressor, block=block, seed=seed, params=params, group=group,
        )  # fmt: skip


class EF(_Fixed):
    """Error feedback (undrift/dp/ef.py): DEF with lambda = 0; its model is x."""

    fixed = ef.METHOD


class SAEF(_Fixed):
    """Step-ahead error feedback without averaged errors (undrift/dp/saef.py): DEF with lambda = 1; its model is x."""

    fixed = saef.METHOD


class PSync(_Fixed):
    """Partial synchronisation of local models (undrift/dp/psync.py): DEF with lambda = 1; its model is their mean, y."""

    fixed = psync.METHOD


class EF21(_Fixed):
    """EF21 (undrift/dp/ef21.py): the first step sends the whole gradient."""

    fixed = ef21.METHOD
