"""A referee for timelines: it plays a table with real queues and knows nothing of how the table was made."""

from __future__ import annotations

from undrift.core.errors import BadSetting
from undrift.pipeline import Schedule
from undrift.pipeline.schedule import BlockWork


def check(table: list[list[BlockWork]], batches: int, schedule: Schedule) -> None:
    """Play a table with real queues; refuse it unless every batch passes every block within the queues' lengths."""
    blocks, in_order = schedule.blocks, schedule.in_order
    inputs: list[list[int]] = [[] for _ in range(blocks)]  # M_k
    outputs: list[list[int]] = [list(range(batches)), *([] for _ in range(blocks))]  # waiting for block k from below
    errors: list[list[int]] = [[] for _ in range(blocks + 1)]  # waiting for block k from above

    def refuse(t: int, k: int, why: str) -> None:
        marks = ("   <-- here" if n == t else "" for n in range(len(table)))
        rows = [
            f"{n}: {' | '.join(map(str, row))}{mark}" for n, (row, mark) in enumerate(zip(table, marks, strict=True))
        ]
        raise BadSetting(f"timestamp {t}, block {k}: {why}\n" + "\n".join(rows[max(0, t - 3) : t + 2]))

    for t, row in enumerate(table):
        # Unless blocks run in order, a message sent at t arrives after t.
        sent: list[tuple[list[int], int]] = []
        for k, (forward, _) in enumerate(row):
            if forward is not None:
                if not outputs[k] or outputs[k].pop(0) != forward:
                    refuse(t, k, f"batch {forward} is forwarded, but is not the next one here")
                inputs[k].append(forward)
                if len(inputs[k]) > 1 + schedule.m[k]:
                    refuse(t, k, f"more than 1 + m = {1 + schedule.m[k]} inputs are stored")
                sent.append((outputs[k + 1], forward))
                if in_order or k == blocks - 1:
                    _deliver(sent)
                waiting = len(outputs[k + 1]) + sum(queue is outputs[k + 1] for queue, _ in sent)
                if k < blocks - 1 and waiting > 1 + schedule.p[k]:
                    refuse(t, k, f"more than 1 + p = {1 + schedule.p[k]} outputs wait")
        for k in reversed(range(blocks)):
            backward = row[k].backward
            if backward is not None:
                arrived = outputs[blocks] if k == blocks - 1 else errors[k]  # the loss gives the last block its error
                if not arrived or arrived.pop(0) != backward:
                    refuse(t, k, f"batch {backward} is backwarded, but its error gradient is not the next one here")
                if inputs[k].pop(0) != backward:
                    refuse(t, k, f"batch {backward} is backwarded, but is not the oldest stored input")
                if k:
                    sent.append((errors[k - 1], backward))
                    if in_order:
                        _deliver(sent)
        _deliver(sent)
    left = [k for k in range(blocks) if inputs[k] or outputs[k] or errors[k]]
    if left:
        raise BadSetting(f"the table ends before blocks {left} have done all {batches} batches")


def _deliver(sent: list[tuple[list[int], int]]) -> None:
    for queue, batch in sent:
        queue.append(batch)
    sent.clear()
