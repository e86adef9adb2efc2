"""A federation in network namespaces: one server, four clients, each behind a link of its own with a limited rate.

    sudo python benchmarks/federation.py --mbit 20 --rounds 4

Prints rounds a minute, bytes a round on the links beside those of the arrays and those of the method, and where the time goes.
Needs root, iproute2 and `pip install 'undrift[flower]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from undrift.deploy.local import federation
from undrift.deploy.settings import Plan
from undrift.jobs.folder import RunFolder

SERVER, ADDRESS = "undrift-server", "10.77.0.1"


def do(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_can() -> None:
    """End with one line where namespaces cannot be made."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit("network namespaces need root, and ip and tc of iproute2: run it with sudo")


def space(client: int) -> str:
    return f"undrift-client-{client}"


@contextlib.contextmanager
def links(clients: int, mbit: float) -> Iterator[None]:
    """A namespace for the server, with a bridge, and one for each client, with a shaped link to it."""
    spaces = [SERVER, *(space(i) for i in range(clients))]
    try:
        for name in spaces:
            do("ip", "netns", "add", name)
            do("ip", "-n", name, "link", "set", "lo", "up")
        do("ip", "-n", SERVER, "link", "add", "bridge", "type", "bridge")
        do("ip", "-n", SERVER, "addr", "add", f"{ADDRESS}/24", "dev", "bridge")
        do("ip", "-n", SERVER, "link", "set", "bridge", "up")
        for i in range(clients):
            there = ("peer", "name", "uplink", "netns", space(i))
            do("ip", "link", "add", f"to{i}", "netns", SERVER, "type", "veth", *there)
            do("ip", "-n", SERVER, "link", "set", f"to{i}", "master", "bridge", "up")
            do("ip", "-n", space(i), "addr", "add", f"10.77.0.{10 + i}/24", "dev", "uplink")
            do("ip", "-n", space(i), "link", "set", "uplink", "up")
            for where, end in ((SERVER, f"to{i}"), (space(i), "uplink")):
                shape = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
                do("tc", "-n", where, "qdisc", "add", "dev", end, "root", *shape)
        yield
    finally:
        for name in spaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def crossed(clients: int) -> int:
    """Bytes that have crossed the links so far, both ways, with everything that Flower, TLS and TCP add."""
    shown = json.loads(do("ip", "-n", SERVER, "-j", "-s", "link"))
    ends = {f"to{i}" for i in range(clients)}
    return sum(end["stats64"][way]["bytes"] for end in shown if end["ifname"] in ends for way in ("rx", "tx"))


def within(part: str) -> list[str]:
    name = space(int(part.removeprefix("client-"))) if part.startswith("client-") else SERVER
    return ["ip", "netns", "exec", name]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--clients", type=int, default=4)
    asked.add_argument("--mbit", type=float, default=20.0)
    asked.add_argument("--rounds", type=int, default=4)
    asked.add_argument("--algorithm", default="scaffold")
    asked.add_argument("--model", default="mlp")
    a = asked.parse_args()
    check_can()
    with tempfile.TemporaryDirectory() as out, links(a.clients, a.mbit):
        settings = {
            "algorithm": a.algorithm,
            "model": a.model,
            "rounds": a.rounds,
            "device": "cpu",
            "out": f"{out}/run",
        }
        plan = Plan.of(settings | {"clients": a.clients, "cohort": a.clients, "eval_every": a.rounds})
        with federation(a.clients, host=ADDRESS, within=within) as parts:
            for client in range(a.clients):
                parts.start_client(client)
            run, marks = parts.run(plan), []
            while run.poll() is None:  # (rounds done, bytes on the links, seconds) whenever a round is over
                done = parts.log("run").count(f" of {a.rounds}: ")
                if done > len(marks):
                    marks.append((done, crossed(a.clients), time.perf_counter()))
                time.sleep(0.05)
            if not RunFolder(Path(plan.deploy.out)).is_finished():
                sys.exit(parts.log("run") + parts.log("superlink")[-3000:])
        # The first round also waits for imports from a cold disk.
        records = RunFolder(Path(plan.deploy.out)).records()[1:]
    (_, bytes_then, then), (_, bytes_now, now) = marks[0], marks[-1]
    rounds = len(records)

    def each(name: str) -> float:
        return sum(record[name] for record in records) / rounds

    crossing = (bytes_now - bytes_then) / rounds
    method, arrays = each("bytes_down") + each("bytes_up"), each("wire_down") + each("wire_up")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} at the end, with these processes and others'")
    print(f"{a.algorithm}, {a.model}, {a.clients} clients, links of {a.mbit:g} Mbit/s; means of {rounds} rounds")
    print(f"rounds a minute        {60 * rounds / (now - then):8.2f}")
    print(f"bytes a round, method  {method:12,.0f}")
    print(f"  as arrays on the wire{arrays:12,.0f}  ({arrays / method:.3f} of it)")
    print(f"  crossing the links   {crossing:12,.0f}  ({crossing / method:.3f} of it)")
    link = arrays / a.clients * 8 / (a.mbit * 1e6)
    print(f"seconds a round        {each('seconds'):8.2f}")
    print(f"  exchange with clients{each('exchange_seconds'):8.2f}")
    print(f"    their own work     {each('client_seconds'):8.2f}")
    print(f"    the link, computed {link:8.2f}")
    rest = each("exchange_seconds") - each("client_seconds") - link
    print(f"    Flower: processes started for each message, polling, copying {rest:8.2f}")
    print(f"  the server's own work{each('seconds') - each('exchange_seconds'):8.2f}")


if __name__ == "__main__":
    main()
