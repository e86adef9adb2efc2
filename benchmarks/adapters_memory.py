"""Memory of a cohort of 32 that trains adapters over one frozen model of transformers: shared, or a copy for each client.

    python benchmarks/adapters_memory.py

Each way runs in a process of its own, which says its peak of resident memory and what it had before the model was made. The
rival is the loop that one writes with peft: a copy of the whole model for each client, trained one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
WAYS = ("stacked", "pool", "copied")
STEPS, BATCH, RANK = 1, 1, 8


def config(width: int, depth: int, length: int) -> dict[str, int | float | str]:
    """A GPT-2 without dropout."""
    return {
        "model_type": "gpt2", "vocab_size": 128, "n_positions": length, "n_embd": width, "n_layer": depth, "n_head": 4,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


def resident(what: str) -> float:
    """MB from /proc/self/status: VmRSS now, VmHWM the peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[what].split()[0]) / 1024


def measure(way: str, file: str, length: int, clients: int) -> dict[str, float]:
    """One round in this process."""
    import numpy as np
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import undrift
    from undrift.core.lora import Lora
    from undrift.jobs.registry import build_model
    from undrift.models._adapters import with_lora

    torch.set_num_threads(1)
    words = np.random.default_rng(0).integers(0, 128, (clients, 2, length + 1))
    before = resident("VmRSS")
    if way == "copied":
        module = with_lora(build_model(f"hf:{file}", (length,), 128, 0, 1), Lora(RANK))
        sent = copied(module, torch.from_numpy(words))
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    else:
        parts = [(rows[:, :-1], rows[:, 1:]) for rows in words]
        result = undrift.run(
            model=f"hf:{file}", lora=f"r={RANK}", data=(parts, parts[0]), rounds=1, cohort=clients, steps=STEPS, batch=BATCH,
            execution=way, chunk=clients if way == "stacked" else 0,
        )  # fmt: skip
        sent = result.records[0]["bytes_up"] // clients
        frozen = sum(tensor.numel() for name, tensor in result.model.items() if "lora_" not in name)
    return {"before": before, "peak": resident("VmHWM"), "frozen": 4 * frozen / 2**20, "sent": float(sent)}


def copied(module: object, words: object) -> int:
    """A cohort whose clients each have a copy of the model; returns the bytes that one sends."""
    import copy

    import torch
    import torch.nn.functional as F

    models = [copy.deepcopy(module) for _ in words]  # type: ignore[attr-defined]
    for model, rows in zip(models, words, strict=True):  # type: ignore[call-overload]
        trained = [p for p in model.parameters() if p.requires_grad]
        logits = model(input_ids=rows[:BATCH, :-1]).logits
        grads = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), rows[:BATCH, 1:].flatten()), trained)
        with torch.no_grad():
            for p, g in zip(trained, grads, strict=True):
                p -= 0.1 * g
    return 4 * sum(p.numel() for p in trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--config", default="")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--clients", type=int, default=32)
    chosen = parser.parse_args()
    if chosen.way:
        print(json.dumps(measure(chosen.way, chosen.config, chosen.length, chosen.clients)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config(chosen.width, chosen.depth, chosen.length)))
        for way in WAYS:
            command = [sys.executable, "-W", "ignore", __file__, "--way", way, "--config", str(file)]
            command += ["--length", str(chosen.length), "--clients", str(chosen.clients)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            found = json.loads(told)
            more = found["peak"] - found["before"]
            print(
                f"{way:8} {chosen.clients} clients, frozen model {found['frozen']:.1f} MB: {more:.0f} MB more at the peak, "
                f"{more / found['frozen']:.1f} models; a client sends {found['sent']:.0f} bytes"
            )


if __name__ == "__main__":
    main()
