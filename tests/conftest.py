"""One thread a test process: two processes share two cores, and small tensors gain nothing from more."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
