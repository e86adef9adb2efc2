"""Small training loops for several ranks: `python -m tests.dataparallel.cases FOLDER 2 3` runs them on two, then three."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import undrift
from undrift import cli
from undrift.core.errors import UndriftError
from undrift.dataparallel.command import run_parallel

STEPS, LR, MOMENTUM, DECAY = 12, 0.2, 0.9, 0.01
SHARED: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "seed": 3, "compressor": "rbgs"}
PARALLEL = [
    "--dtype", "float64", "--model", "mlp", "--batch", "4", "--steps", "5", "--ratio", "16", "--weight-decay", "0.001",
    "--eval-every", "2", "--checkpoint-every", "3", "--lr-drops", "3", "--warmup", "1",
]  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "def": ("DEF", {"lam": 0.3, "ratio": 7}),
    "def auto": ("DEF", {"ratio": 7, "lam": "auto"}),
    "def auto topk": ("DEF", {"ratio": 7, "lam": "auto", "compressor": "topk"}),
    "def tensor": ("DEF", {"lam": 0.3, "ratio": 7, "block": "tensor"}),
    "def shuffle": ("DEF", {"lam": 0.3, "ratio": 7, "block": "shuffle"}),
    "def randk": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "randk"}),
    "def randk tensor": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "randk", "block": "tensor"}),
    "def leader": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "leader"}),
    "def leader tensor": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "leader", "block": "tensor"}),
    "def auto leader": ("DEF", {"lam": "auto", "ratio": 7, "compressor": "leader"}),
    "def topk": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "topk"}),
    "def topk tensor": ("DEF", {"lam": 0.3, "ratio": 7, "compressor": "topk", "block": "tensor"}),
    "def plain sgd": ("DEF", {"lam": 0.3, "ratio": 7, "momentum": 0.0, "weight_decay": 0.0}),
    "def 0": ("DEF", {"ratio": 7, "lam": 0.0}),
    "def 1": ("DEF", {"ratio": 7, "lam": 1.0}),
    "ef": ("EF", {"ratio": 7}),
    "saef": ("SAEF", {"ratio": 7}),
    "psync": ("PSync", {"ratio": 7}),
    "psync topk": ("PSync", {"ratio": 7, "compressor": "topk"}),
    "ef21": ("EF21", {"ratio": 7}),
    "ef21 topk": ("EF21", {"ratio": 7, "compressor": "topk"}),
    "ef21 sgdm": ("EF21SGDM", {"ratio": 7}),
    "ef21 sgdm topk": ("EF21SGDM", {"ratio": 7, "compressor": "topk"}),
    "ef21 sgdm all": ("EF21SGDM", {"ratio": 1}),
    "ef21 sgdm plain": ("EF21SGDM", {"ratio": 7, "momentum": 0.0}),
    "ef21 plain": ("EF21", {"ratio": 7, "momentum": 0.0}),
} | {f"{name.lower()} whole": (name, {"ratio": 1}) for name in ("DEF", "EF", "SAEF", "PSync", "EF21")}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def samples(t: int, worker: int, count: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * t + worker)
    x = torch.randn(count, 5, generator=random, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=random)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(t: int, worker: int, z: Tensor, decay: float = DECAY) -> Tensor:
    """The gradient of a worker's batch at a vector, with weight decay, for the reference."""
    model = network()
    nn.utils.vector_to_parameters(z, model.parameters())
    inputs, targets = samples(t, worker)
    F.cross_entropy(model(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) + decay * z


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, t: int, rank: int) -> None:
    optimizer.zero_grad()
    inputs, targets = samples(t, rank)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def path(case: str, rank: int, steps: int = STEPS) -> dict[str, Tensor]:
    """A case's x, y, errors and points on this rank, one row an iteration, and the bytes that all ranks sent."""
    name, settings = CASES[case]
    model = network()
    optimizer = getattr(undrift, name)(model, **(SHARED | settings))
    rows: dict[str, list[Tensor]] = {"x": [], "y": [], "own": [], "z": [], "m": [], "sent": []}
    for t in range(steps):
        before = optimizer.workers.sent
        learn(model, optimizer, t, rank)
        rows["sent"].append(torch.tensor(optimizer.workers.sent - before))
        state = optimizer.vectors
        rows["x"].append(state.x.clone())
        rows["own"].append(getattr(state, "e", state[-1]).clone())
        rows["m"].append(getattr(state, "m", state.x).clone())  # EF21SGDM has a v instead
        rows["z"].append(vector(model))
        with optimizer.evaluating("def"):
            rows["y"].append(vector(model))
        assert torch.equal(vector(model), rows["z"][-1]), "evaluating puts the parameters back"
    return {key: torch.stack(values) for key, values in rows.items()}


def refused(make: Any) -> str:
    try:
        make()
    except UndriftError as error:
        return str(error)
    return "nothing was refused"


def disagreements(rank: int) -> dict[str, str]:
    wide = nn.Sequential(nn.Linear(5, 6 + rank), nn.Tanh(), nn.Linear(6 + rank, 3)).double()
    model = network()
    optimizer = undrift.DEF(model, lr=0.1)
    states = []
    for t in range(2):
        learn(model, optimizer, t, rank)
        states.append(optimizer.state_dict())
    apart, fresh = undrift.DEF(network(), lr=0.1), undrift.DEF(network(), lr=0.1)
    apart.load_state_dict(states[rank])
    if rank == 0:
        fresh.load_state_dict(states[1])
    return {
        "step": refused(apart.step),
        "loaded by one": refused(lambda: fresh.evaluating().__enter__()),
        "seed": refused(lambda: undrift.DEF(network(), lr=0.1, seed=rank)),
        "ratio": refused(lambda: undrift.DEF(network(), lr=0.1, ratio=64 + rank)),
        "model": refused(lambda: undrift.DEF(wide, lr=0.1)),
        "lam": refused(lambda: undrift.DEF(network(), lr=0.1, lam=0.3 + 0.1 * rank)),
    }


def as_in_a_loop(rank: int, wrapped: bool) -> dict[str, Tensor]:
    """Accumulation, clipping, a schedule and parameter groups, on a plain module and on DDP."""
    model = network(seed=rank)  # other weights on each rank: rank 0's are taken
    inner = model
    if wrapped:
        model = DistributedDataParallel(model)
    first, last = inner[0], inner[2]  # type: ignore[index]
    groups = [
        {"params": list(first.parameters())},
        {"params": list(last.parameters()), "lr": 0.05, "weight_decay": 0.0},
    ]
    undrift.EF(model, lr=0.1)  # an optimizer before, on the same DDP
    optimizer = undrift.DEF(model, lr=0.2, momentum=0.9, weight_decay=0.01, ratio=7, params=groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for t in range(10):
        optimizer.zero_grad()
        for part in range(3):
            quiet = (
                model.no_sync() if isinstance(model, DistributedDataParallel) and part < 2 else contextlib.nullcontext()
            )
            with quiet:
                inputs, targets = samples(10 * t + part, rank)
                F.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    assert len(hooked) == 10
    rates = torch.tensor([g["lr"] for g in optimizer.param_groups])
    return {"x": optimizer.vectors.x, "z": vector(inner), "e": optimizer.vectors.e, "rates": rates}


def wrapped_ddp(rank: int) -> dict[str, Tensor]:
    """The gradients of a rank where DDP lies inside another module, as torch.compile makes it."""
    model = network()
    around = nn.Sequential(DistributedDataParallel(model))
    undrift.DEF(around, lr=0.1)
    inputs, targets = samples(0, rank)
    F.cross_entropy(around(inputs), targets).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"found": found, "own": gradient(0, rank, vector(model), decay=0.0)}


def scaled(rank: int) -> dict[str, Any]:
    """ShardedGradScaler in float16: an overflow on rank 1 alone makes all ranks skip the step."""
    model = network().float()
    optimizer = undrift.DEF(model, lr=0.1, momentum=0.9, ratio=7)
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10)
    skipped = []
    for t in range(6):
        optimizer.zero_grad()
        inputs, targets = samples(t, rank)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs.float()), targets)
        if t == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = optimizer.t
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.t == before)
    return {"x": optimizer.vectors.x, "skipped": skipped, "finite": bool(vector(model).isfinite().all())}


def narrow(rank: int) -> dict[str, Tensor]:
    """A model in bfloat16 is trained on a float32 copy."""
    model = network().bfloat16()
    optimizer = undrift.DEF(model, lr=0.1, momentum=0.9, ratio=7, lam=0.3)
    for t in range(6):
        optimizer.zero_grad()
        inputs, targets = samples(t, rank)
        F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        optimizer.step()
    return {"x": optimizer.vectors.x, "z": vector(model).float(), "e": optimizer.vectors.e}


def resumed(rank: int, folder: Path) -> dict[str, bool]:
    """Going on from a checkpoint, one file a rank or torch.distributed.checkpoint, equals never having stopped."""
    import torch.distributed.checkpoint as dcp

    def made(name: str) -> tuple[nn.Module, Any]:
        model = network(seed=7)
        return model, getattr(undrift, name)(model, **SHARED, ratio=7)

    same = {}
    for name in ("DEF", "EF21", "EF21SGDM"):
        model, optimizer = made(name)
        for t in range(5):
            learn(model, optimizer, t, rank)
        torch.save(optimizer.state_dict(), folder / f"{name}-{rank}.pt")
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / f"{name}-dcp")
        whole = optimizer.whole_state_dict()
        if rank == 0 and name == "DEF":
            torch.save(whole, folder / "whole.pt")
        for t in range(5, 10):
            learn(model, optimizer, t, rank)
        for way in ("file", "dcp", "whole"):
            other, again = made(name)
            if way == "file":
                again.load_state_dict(torch.load(folder / f"{name}-{rank}.pt"))
            elif way == "whole":
                again.load_state_dict(whole)
            else:
                target = {"optimizer": again.state_dict()}
                dcp.load(target, checkpoint_id=folder / f"{name}-dcp")
                again.load_state_dict(target["optimizer"])
            for t in range(5, 10):
                learn(other, again, t, rank)
            pairs = zip(again.vectors, optimizer.vectors, strict=True)
            same[f"{name} {way}"] = torch.equal(vector(other), vector(model)) and all(
                torch.equal(a, b) for a, b in pairs
            )
    return same


def other_number(rank: int, stored: Path) -> dict[str, Any]:
    """A checkpoint of two ranks on three."""
    state = torch.load(stored)
    model = network(seed=7)
    optimizer = undrift.DEF(model, **SHARED, ratio=7)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    with optimizer.evaluating("def"):
        y = vector(model)
    wanted = state["state"]["x"] - (state["state"]["e/rank0"] + state["state"]["e/rank1"]) / 2
    learn(model, optimizer, 5, rank)
    lacking = {k: v for k, v in state["state"].items() if k != "e/rank1"}
    refusal = refused(lambda: optimizer.load_state_dict(state | {"state": lacking}))
    return {
        "y": y,
        "wanted": wanted,
        "x": optimizer.vectors.x,
        "told": [str(w.message) for w in told],
        "refusal": refusal,
    }


def socket_bytes(rank: int) -> dict[str, int]:
    """What crosses the loopback device in 20 steps of a model of 2 million parameters, and what was counted."""
    model = nn.Linear(2000, 1000, bias=False)
    optimizer = undrift.DEF(model, lr=0.1, ratio=16, compressor="rbgs")
    model.weight.grad = torch.full_like(model.weight, 1.0 + rank)
    optimizer.step()  # the first one also sends rank 0's parameters

    def passed() -> int:
        (line,) = (row for row in Path("/proc/self/net/dev").read_text().splitlines() if row.strip().startswith("lo:"))
        return int(line.split()[9])

    dist.barrier()
    before, counted = passed(), optimizer.workers.sent
    dist.barrier()
    for _ in range(20):
        optimizer.step()
    dist.barrier()
    return {"socket": passed() - before, "counted": optimizer.workers.sent - counted, "parameters": 2_000_000}


def lost(rank: int) -> str:
    """How a rank ends when another one is silent, in a step and at the start."""
    group, another = (dist.new_group(timeout=timedelta(seconds=2)) for _ in range(2))
    model = network()
    optimizer = undrift.DEF(model, lr=0.1, group=group)
    began = time.monotonic()
    if rank == dist.get_world_size() - 1:
        time.sleep(6)
        return "silent"
    told = [
        refused(lambda: learn(model, optimizer, 0, rank)),
        refused(lambda: undrift.DEF(model, lr=0.1, group=another)),
    ]
    return f"{time.monotonic() - began:.1f} {'; '.join(told)}"


def commanded(count: int, folder: Path) -> int:
    """`undrift dp` as torchrun would start it, stopped half way and resumed; the exit code."""
    settings = ["dp", *PARALLEL, "--out", str(folder / f"dp{count}")]
    return cli.main([*settings, "--rounds", "2"]) or cli.main([*settings, "--rounds", "4", "--resume"])


def everything(rank: int, folder: Path) -> dict[str, Any]:
    count = dist.get_world_size()
    found: dict[str, Any] = {case: path(case, rank) for case in (CASES if count < 4 else ["def"])}
    found["dp"] = commanded(count, folder)
    if count == 2:
        found["socket"] = socket_bytes(rank)
        found |= {"disagreements": disagreements(rank), "resumed": resumed(rank, folder), "scaled": scaled(rank)}
        found["wrapped ddp"] = wrapped_ddp(rank)
        found |= {"narrow": narrow(rank), "plain": as_in_a_loop(rank, False), "ddp": as_in_a_loop(rank, True)}
    if count == 3:
        found["other number"] = other_number(rank, folder / "whole.pt")
        found["other workers"] = refused(lambda: run_parallel(out=folder / "dp2", resume=True))
        found["lost"] = lost(rank)
    return found


def be_a_rank(rank: int, count: int, port: int, folder: Path) -> None:
    """Run everything in this process, and end it."""
    signal.alarm(120)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        torch.save(everything(rank, folder), folder / f"{count}-{rank}.pt")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # a group in which a rank was lost cannot be taken down in order


if __name__ == "__main__":
    import torch._dynamo  # what every rank would import
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    for ranks_wanted in map(int, sys.argv[2:]):  # forked, because importing torch takes longer than the cases
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = free.getsockname()[1]
        children = []
        for number in range(ranks_wanted):
            child = os.fork()
            if child == 0:
                be_a_rank(number, ranks_wanted, place, Path(sys.argv[1]))
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            sys.exit(f"of {ranks_wanted} ranks, some failed: {codes}")
