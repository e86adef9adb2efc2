"""Train a network in three blocks with diversely stale parameters, and compare it with plain backpropagation.

python pipeline_dsp.py                                            # a simulation in one process
torchrun --nproc-per-node 3 pipeline_dsp.py                       # one process for each block
"""

from __future__ import annotations

import torch
from torch import nn

from undrift.data.load import load_dataset
from undrift.pipeline import DSP, Schedule

BLOCKS, EPOCHS, BATCH = 3, 20, 32
QUEUES = Schedule.parse("1,1,0;4,2,0")  # p; m: block 0 is 4 batches behind with its backward, block 1 is 2 behind


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)),
    )


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4)


def main() -> None:
    data = load_dataset("digits")
    x, y = torch.tensor(data.x_train).flatten(1) / 255, torch.tensor(data.y_train).long()
    test = [(torch.tensor(data.x_test).flatten(1) / 255, torch.tensor(data.y_test).long())]
    for name, schedule in (("DSP", QUEUES), ("BP", Schedule.bp(BLOCKS))):
        pipeline = DSP(network(), cuts=[3, 6], p=schedule.p, m=schedule.m, optimizer=sgd)
        for epoch in range(EPOCHS):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(BATCH):
                if len(rows) == BATCH:  # all batches have the same shape
                    pipeline.step((x[rows], y[rows]))  # the queues stay full from epoch to epoch
        pipeline.flush()
        scores = pipeline.evaluate(test)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(f"{name}({schedule}): accuracy {scores['accuracy']:.4f}, loss {scores['loss']:.4f}")


if __name__ == "__main__":
    main()
