"""DEF on a GPU over a process group: `torchrun ... -m tests.dataparallel.cuda_case gloo | nccl` compares it with the CPU."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import undrift
from tests.dataparallel.cases import learn, network, samples, vector


def trained(device: str, settings: dict[str, object], group: dist.ProcessGroup | None) -> torch.Tensor:
    model = network().to(device)
    optimizer = undrift.DEF(model, lr=0.2, momentum=0.9, weight_decay=0.01, ratio=7, group=group, **settings)  # type: ignore[arg-type]
    for t in range(8):
        if device == "cpu":
            learn(model, optimizer, t, dist.get_rank())
            continue
        optimizer.zero_grad()
        inputs, targets = (v.to(device) for v in samples(t, dist.get_rank()))
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with optimizer.evaluating("def"):
        return torch.stack([vector(model).cpu(), optimizer.vectors.x.cpu()])


if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    if sys.argv[1] == "nccl":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    beside = dist.new_group(backend="gloo")
    ways: list[dict[str, object]] = [
        {}, {"lam": "auto"}, {"block": "tensor"}, {"compressor": "randk"}, {"compressor": "topk"},
    ]  # fmt: skip
    for settings in ways:
        ours, theirs = trained("cuda", settings, None), trained("cpu", settings, beside)
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11), settings
        everybody: list[torch.Tensor] = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, ours, group=beside)
        assert all(torch.equal(each[1], ours[1]) for each in everybody), "x has the same bits on all ranks"
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} over {sys.argv[1]}: {len(ways)} ways as on the CPU")
    dist.destroy_process_group()
