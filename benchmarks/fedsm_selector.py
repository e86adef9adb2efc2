"""FedSM's selector on two real retinal sites: what it sends to the right model, by how it learns.

    UNDRIFT_DATA=... python benchmarks/fedsm_selector.py --json benchmarks/results/fedsm-selector.json

The selector learns from the pictures and the clients' numbers alone, so a U-Net of one channel is trained beside it: the shares
of test pictures that get their own client's model are those of any U-Net with the same batches. Settings are those of the sweep
fedsm-retina; with gamma = 0 a personal model is always used.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import undrift
from undrift.jobs.course import commit

RUN = dict(
    algorithm="fedsm", dataset="retina(parts=3)", model="unet(width=1, depth=1)", partition="sites", clients=6, cohort=6,
    epochs=1.0, batch=8, weights="size",
)  # fmt: skip
SET = dict(optimizer="adam", keep_moments=True, lr=0.002, lam=0.7, selector_lr=0.01, gamma=0.0)
PICTURES = "picture-statistics"
VARIANTS: dict[str, dict[str, object]] = {
    "small-cnn, as in fedsm-retina": {},
    "rate 0.001": dict(selector_lr=0.001),
    "rate 0.03": dict(selector_lr=0.03),
    "uniform weights": dict(selector_weights="uniform"),
    "uniform weights, rate 0.03": dict(selector_weights="uniform", selector_lr=0.03),
    "per batch (Algorithm 2 of the thesis)": dict(selector_mode="per_batch"),
    "vgg11, rate 0.001": dict(selector_model="vgg11", selector_lr=0.001),
    "picture statistics": dict(selector_model=PICTURES),
    "picture statistics, rate 0.1": dict(selector_model=PICTURES, selector_lr=0.1),
    "picture statistics, uniform weights": dict(selector_model=PICTURES, selector_weights="uniform"),
    "picture statistics, uniform weights, rate 0.1": dict(
        selector_model=PICTURES, selector_weights="uniform", selector_lr=0.1
    ),
}
LONGER = {"small-cnn, as in fedsm-retina": 240}  # rounds, beside the 60 of all


def shares(name: str, rounds: int, seed: int) -> dict[str, object]:
    """For every client the share of its test pictures that get its own model."""
    began = time.process_time()
    result = undrift.run(**RUN, set=SET | VARIANTS[name], rounds=rounds, eval_every=rounds, seed=seed)  # type: ignore[arg-type]
    chosen = result.records[-1]["sites"]["chosen"]["test"]
    own = [counts[i + 1] / sum(counts) for i, counts in enumerate(chosen)]
    return {
        "selector": name, "rounds": rounds, "seed": seed, "own": own, "chosen": chosen,
        "processor_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--only", help="variants, with commas and semicolons between them")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    names = given.only.split(";") if given.only else list(VARIANTS)
    rows: list[dict[str, object]] = []
    for name in names:
        for rounds in [given.rounds, *([LONGER[name]] if name in LONGER else [])]:
            for seed in range(given.seeds):
                rows.append(shares(name, rounds, seed))
                print(name, rounds, seed, [f"{share:.2f}" for share in rows[-1]["own"]], flush=True)  # type: ignore[attr-defined]
                if given.json:
                    given.json.write_text(json.dumps({"commit": commit(), "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
