"""The settings of `undrift.run` as typed keywords, for editors; a test keeps them equal to `RunConfig`."""

from __future__ import annotations

from typing import Any, TypedDict


class RunSettings(TypedDict, total=False):
    """Each is a flag of `undrift run`, where its help stands."""

    lr: float  # the same as set={"lr": ...}
    lora: str
    partition: str
    clients: int
    cohort: int
    sampling: str
    steps: int
    epochs: float
    batch: int
    batches: str
    compress: str
    aggregate: str
    attack: str
    weights: str
    privacy_clip: float
    privacy_noise: float
    privacy_delta: float
    privacy_quantile: float
    dropout_rate: float
    slow: str
    bandwidth: float
    latency: float
    clock: str
    step_seconds: float
    over_select: int
    asynchronous: bool
    concurrent: int
    own_test: float
    colour: float
    chunk: int
    client_eval_every: int
    client_state: str
    dataset: str
    rounds: int
    seed: int
    val_fraction: float
    warmup: float
    lr_decay: float
    lr_drops: str
    lr_drop: float
    device: str
    dtype: str
    execution: str
    replay: bool
    compile: str
    precision: str
    deterministic: bool
    eval_every: int
    checkpoint_every: int
    stop_at: str
    track: str
    set: dict[str, Any]
