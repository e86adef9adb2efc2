"""Islands on a GPU over a process group: `torchrun ... -m tests.dataparallel.islands_case gloo | nccl` compares with the CPU."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import undrift
from tests.dataparallel.cases import network, samples, vector

WAYS = (("diloco", ""), ("diloco", "int4"), ("scaffold", "topk:4"), ("streaming-diloco", ""), ("sparseloco", ""))


def trained(device: str, algorithm: str, compress: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"lr": 0.1} | ({"fragments": 2} if algorithm == "streaming-diloco" else {})
    outer = undrift.LocalSteps(model, algorithm, every=4, set=given, compress=compress, group=group)
    for t in range(13):
        inputs, targets = (v.to(device) for v in samples(t, dist.get_rank()))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        outer.correct()
        optimizer.step()
        outer.step()
    with outer.evaluating():
        return vector(model).cpu()


if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it shows that the case itself works
    if sys.argv[1] == "nccl":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    beside = dist.new_group(backend="gloo")
    for algorithm, compress in WAYS:
        ours, theirs = trained(device, algorithm, compress, None), trained("cpu", algorithm, compress, beside)
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10), (algorithm, compress)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} over {sys.argv[1]}: {len(WAYS)} ways as on the CPU")
    dist.destroy_process_group()
