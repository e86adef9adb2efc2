"""What secure aggregation costs: bytes on the wire, and seconds of one core, for a client and for the server.

python benchmarks/masks.py --clients 10 --gone 2 --parameters 1000000
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from undrift.deploy import masks
from undrift.deploy.masks import KEY, MARK, SEALED, SEED

CONTEXT = "run 0 train"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    for name, default in (("clients", 10), ("gone", 2), ("parameters", 1_000_000)):
        flags.add_argument(f"--{name}", type=int, default=default)
    given = flags.parse_args()
    n, gone, entries = given.clients, given.gone, given.parameters
    least, stay = masks.threshold(n), n - given.gone
    own = [masks.draw_secrets() for _ in range(n)]
    public = dict(enumerate(map(masks.public_keys, own)))

    began = time.perf_counter()
    shares = [[masks.split(s, least, n) for s in (mine.mask, mine.seed)] for mine in own]
    for place, other in ((p, o) for p in range(1) for o in range(1, n)):
        masks.seal(masks.agree(own[place].cipher, public[other][:KEY], "share"), bytes(SEALED - 16))
    sharing = (time.perf_counter() - began) / n

    update = np.random.default_rng(0).normal(0, 0.01, entries)
    began = time.perf_counter()
    numbers = masks.to_fixed(update, 16.0, n)
    masks.mask(numbers, own[0], 0, {p: k for p, k in public.items() if p}, CONTEXT)
    masking = time.perf_counter() - began

    began, total = time.perf_counter(), np.zeros(entries, np.uint32)
    for _ in range(stay):
        np.add(total, numbers, out=total)
    seeds = [masks.join(dict(enumerate(s for s in shares[p][1])), least) for p in range(stay)]
    keys = {p: masks.join(dict(enumerate(shares[p][0])), least) for p in range(stay, n)}
    assert seeds == [mine.seed for mine in own[:stay]] and all(keys[p] == own[p].mask for p in keys)
    masks.unmask(total, seeds, keys, {p: public[p] for p in range(stay)}, CONTEXT)
    server = time.perf_counter() - began

    up = 2 * KEY + n * SEALED + MARK + 4 * entries + stay * SEED + gone * KEY
    down = n * (2 * KEY + 8) + n * (SEALED + 8) + stay * 8
    print(f"{n} clients, {gone} leave, {entries:,} parameters; {least} must stay")
    print(f"up, of each client: {up:,} bytes, {up / (4 * entries):.4f} of the plain upload; down: {down:,} bytes more")
    print(
        f"a client: {sharing:.3f} s for shares, {masking:.3f} s for masks; the server: {server:.2f} s to take them off"
    )


if __name__ == "__main__":
    main()
