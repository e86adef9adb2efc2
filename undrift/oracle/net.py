"""A module as a pure function of (x, buffers, inputs), safe to run for many clients at once.

The vector x holds the trainable parameters of any `nn.Module`, the vector of buffers BatchNorm's running statistics. All clients
share the rest. BatchNorm ignores padded samples, and Dropout draws from counter-based streams (`layers.py`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from undrift.core.device import half_precision
from undrift.core.errors import BadSetting
from undrift.core.layout import MODEL, Layout
from undrift.core.pieces import Piece, part
from undrift.core.trees import map_tagged
from undrift.oracle import checkpoints
from undrift.oracle.checkpoints import inside
from undrift.oracle.layers import Context, DropoutInFunctions, MaskedBatchNorm, Pass, Promotion, StreamDropout, prepare
from undrift.oracle.losses import Loss, SampleLosses, logits_of

T = TypeVar("T")

ALIGNED = 8  # entries: a GPU accesses 32 bytes at once, and each client's row should begin at such a boundary


class _Holder(nn.Module):
    """Passes its module to a function: `functional_call` swaps the tensors of a module only during a call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, use: Callable[[nn.Module], Any]) -> Any:
        return use(self.module)


class Net(SampleLosses):
    """A copy of a module with its loss and its layout."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = F.cross_entropy,
        dtype: torch.dtype = torch.float32,
        pieces: tuple[Piece, ...] = (),
        trains: Callable[[tuple[str, ...]], Collection[str]] = tuple,
    ) -> None:
        """`trains` chooses among the names of trainable tensors; the others stay as they are, for all clients."""
        if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise BadSetting("the model has lazy layers without parameters yet; call it once on a sample before")
        super().__init__(loss, dtype)
        self.pieces = pieces  # the parts of the inputs, () if they have only one
        self.current = Pass()
        self.original = copy.deepcopy(module).to(dtype)
        trainable = {n: p for n, p in self.original.named_parameters() if p.requires_grad}
        for name in trainable.keys() - set(trains(tuple(trainable))):
            trainable[name].requires_grad_(False)
        # Parameters are in memory once: the frozen ones stay as they are, and a call puts a client's in place of the others.
        prepared = copy.deepcopy(self.original, {id(p): p for p in self.original.parameters()})
        prepare(prepared, "", self.current, module.training, set())
        if not module.training:
            prepared.train()
        trained = [(n, p) for n, p in prepared.named_parameters() if p.requires_grad]
        tables = {id(m.weight) for m in prepared.modules() if isinstance(m, nn.Embedding)}
        self.layout = Layout.of(trained, ALIGNED, frozenset(n for n, p in trained if id(p) in tables))
        if not self.layout.names:
            raise BadSetting("the model has no trainable parameter; set requires_grad on what should be trained")
        tracked = [f"{n}." if n else "" for n, m in prepared.named_modules() if isinstance(m, MaskedBatchNorm)]
        self.buffer_layout = Layout.of(
            (n, b) for n, b in prepared.named_buffers() if any(n == t + n.rpartition(".")[2] for t in tracked)
        )
        buffers = zip(self.buffer_layout.names, self.buffer_layout.sizes, strict=True)
        counters = [torch.full((s,), n.endswith("num_batches_tracked")) for n, s in buffers]
        # True for the buffer entries that are counters: they are aggregated by maximum.
        self.counters = torch.cat([torch.zeros(0, dtype=torch.bool), *counters])
        self.networks: dict[str, Net] = {}  # further networks that an algorithm trains on the same samples, by name
        self.cache: dict[str, Any] = {}  # results of faster forms' checks of this network
        self._local = threading.local()
        # Whether the model has code of its own, which may call dropout as a function.
        self.own_code = any(not type(m).__module__.startswith(("torch.nn.", "undrift.")) for m in prepared.modules())
        if self.own_code:
            checkpoints.install()
        self.checkpoints = False  # whether a pass has had gradient checkpoints in it
        self._training = prepared
        self._evaluation = _copy_sharing_tensors(prepared, self.current).eval()

    def add_network(self, name: str, other: Net) -> None:
        """Add a network to be trained on the same samples; fields that hold its vectors are annotated with its name."""
        self.networks[name] = other

    def start(self) -> tuple[Tensor, Tensor]:
        """The initial x0 [P] and buffers [Q]; without memory where the module has none."""
        named = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        hollow = any(t.is_meta for t in named.values())
        like = torch.zeros((), dtype=self.dtype, device="meta" if hollow else "cpu")
        return self.layout.join(named, like), self.buffer_layout.join(named, like)

    def to(self, device: torch.device) -> Net:
        """Move the tensors that clients share (frozen parameters, constant buffers) to a device."""
        for other in self.networks.values():
            other.to(device)
        if isinstance(self.loss, nn.Module):
            self.loss = copy.deepcopy(self.loss).to(device)
        self.original.to(device)
        self._training.to(device)
        self._evaluation = _copy_sharing_tensors(self._training, self.current).eval()
        self.counters = self.counters.to(device)
        return self

    def unused_parameters(self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context) -> list[str]:
        """The parameters on which the outputs do not depend, as far as autograd knows."""
        alone = {name: tensor.detach().clone().requires_grad_() for name, tensor in self.layout.split(x).items()}
        outputs, _ = self._run(x, buffers, context, False, lambda m: call(m, self.pieces, inputs), alone)
        total = logits_of(outputs).sum()
        if not total.requires_grad:
            return list(alone)
        found = torch.autograd.grad(total, list(alone.values()), allow_unused=True)
        return [name for name, gradient in zip(alone, found, strict=True) if gradient is None]

    def shared_buffers(self) -> dict[str, Tensor]:
        """The buffers that no client has for itself."""
        return {n: b for n, b in self._training.named_buffers() if n not in self.buffer_layout.names}

    def module(self, training: bool) -> nn.Module:
        """This thread's copy: `functional_call` swaps tensors inside the module, so threads must not share one."""
        shared = self._training if training else self._evaluation
        if threading.current_thread() is threading.main_thread():
            return shared
        copies: dict[bool, nn.Module] = vars(self._local).setdefault("copies", {})
        if training not in copies:
            copies[training] = _copy_sharing_tensors(shared, self.current)
        return copies[training]

    def trace(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Like a call, but with the outputs of all blocks: the last one is the model's."""
        return self._run(x, buffers, context, stacked, lambda module: _run_blocks(blocks(module), inputs))

    def onward(
        self, block: int, x: Tensor, buffers: Tensor, h: Tensor, context: Context | None, stacked: bool = False
    ) -> Tensor:
        """Apply the blocks from number `block` on to h, without tracking statistics. Dropout masks are those of a whole pass."""

        def use(module: nn.Module) -> list[Tensor]:
            before = nn.ModuleList(blocks(module)[:block]).modules()
            self.current.drops = sum(isinstance(m, StreamDropout) and m.p > 0 for m in before)
            return _run_blocks(blocks(module)[block:], h)

        outputs: list[Tensor] = self._run(x, buffers, context, stacked, use)[0]
        return outputs[-1]

    def _run(
        self,
        x: Tensor,
        buffers: Tensor,
        context: Context | None,
        stacked: bool,
        use: Callable[[nn.Module], Any],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, Tensor]:
        """The result of `use` on the module with the tensors of x, or those given, and the buffers; and the buffers after it."""
        self.current.drops = 0
        tensors = dict(parameters or self.layout.split(x)) | self.buffer_layout.split(buffers)
        holder, half = _Holder(self.module(context is not None)), half_precision(x.device)
        outputs, statistics = self._pass(holder, tensors, context, stacked, half, use)
        if half:
            outputs = tree_map_only(Tensor, lambda t: t.to(self.dtype), outputs)
        if context is None or not self.buffer_layout.names:
            return outputs, buffers
        new = tensors | statistics  # unused and frozen layers keep their old ones
        return outputs, torch.cat([new[n].reshape(-1) for n in self.buffer_layout.names])

    def _pass(
        self,
        holder: _Holder,
        tensors: dict[str, Tensor],
        context: Context | None,
        stacked: bool,
        half: bool,
        use: Callable[[nn.Module], Any],
    ) -> tuple[Any, dict[str, Tensor]]:
        """The result of `use` on the module with these tensors, and BatchNorm's new statistics."""
        current, named = self.current, {f"module.{name}": tensor for name, tensor in tensors.items()}
        before = inside.again
        current.context, current.stacked, current.statistics = context, stacked, {}

        def again(part: Callable[..., Any]) -> Callable[..., Any]:
            """A part of the model that runs in this pass as it is now, also after its end: for checkpoints."""
            if stacked:
                raise BadSetting(
                    "stacked clients cannot compute activations again; turn the model's gradient checkpointing off, or let "
                    "clients take turns (--execution pool), which needs less memory too"
                )
            self.checkpoints, drops = True, current.drops

            def run(*inputs: Any, **others: Any) -> Any:
                current.drops = drops
                return self._pass(holder, tensors, context, stacked, half, lambda module: part(*inputs, **others))[0]

            return run

        inside.again = again
        try:
            with contextlib.ExitStack() as modes:
                if half:
                    modes.enter_context(Promotion())
                if self.own_code:
                    modes.enter_context(DropoutInFunctions(current, context))
                return functional_call(holder, named, (use,)), current.statistics
        finally:
            inside.again = before
            current.context, current.stacked = None, False

    def __call__(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Outputs for x [P], and the buffers after this pass; context None means evaluation mode."""
        outputs, after = self._run(x, buffers, context, stacked, lambda module: call(module, self.pieces, inputs))
        return logits_of(outputs), after

    def without_padding(self, state: T, tag: str = "") -> T:
        """A message as it is sent: vectors without their padding. `tag` applies to a state that is one tensor."""
        networks = {**self.networks, MODEL: self}
        return map_tagged(lambda t, tag: t[..., : networks[tag].layout.entries] if tag else t, state, tag=tag)

    def state_dict(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """A PyTorch state dict with the names and dtypes of the module."""
        trained = self.layout.split(x) | self.buffer_layout.split(buffers)
        tensors = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        first = {id(tensor): name for name, tensor in tensors.items()}  # tied weights have several names, one entry
        state = {}
        for name, tensor in self.original.state_dict(keep_vars=True).items():
            value = trained.get(first.get(id(tensor), name), tensor)
            state[name] = value.detach().to(tensor.dtype).clone()
        return state


def call(module: nn.Module, pieces: tuple[Piece, ...], inputs: Tensor) -> Any:
    """What a module returns for inputs, which are parted if they have several parts."""
    if not pieces:
        return module(inputs)
    by_place, named = part(pieces, inputs)
    return module(*by_place, **named)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The consecutive parts of a model, a Sequential's or those that it names in `blocks`; the last one is the classifier."""
    named = getattr(module, "blocks", None)
    if isinstance(named, tuple) and len(named) > 1 and all(isinstance(name, str) for name in named):
        return [module.get_submodule(name) for name in named]
    if not only_runs_its_parts(module) or len(module) < 2:
        raise BadSetting(
            "this method needs a model made of blocks: an nn.Sequential of at least two parts whose last one is the "
            "classifier and that does nothing else, or a module whose attribute `blocks` names such parts, not "
            f"{type(module).__name__}"
        )
    return list(module)


def only_runs_its_parts(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether this is an nn.Sequential that does nothing but call its parts, one after another, and has no tensors of its own."""
    usual = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return usual and not (is_altered(module) or module._parameters or module._buffers)


def is_altered(module: nn.Module) -> bool:
    """Whether calling the module does something else than its class says: hooks, or a `forward` of its own."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    return any(vars(module).get(kind) for kind in kinds)


def _run_blocks(parts: list[nn.Module], h: Tensor) -> list[Tensor]:
    return [h := block(h) for block in parts]


def _copy_sharing_tensors(module: nn.Module, current: Pass) -> nn.Module:
    """A copy of the module with the same tensors and the same (thread-local) pass."""
    shared = (current, *module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(each): each for each in shared})
