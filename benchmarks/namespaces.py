"""A federation as on five machines: a server and four clients in network namespaces, each client behind a link of its own.

    sudo python benchmarks/namespaces.py

Everything is as in a real federation: TLS, a key for each client, SCAFFOLD's control variates on the clients' own disks. Needs
root for the namespaces, iproute2 and `pip install 'undrift[flower]'`. `benchmarks/federation.py`, whose links these are,
measures where the time goes.
"""

import sys
import time
from pathlib import Path

from federation import ADDRESS, check_can, crossed, links, within

from undrift.deploy.local import federation
from undrift.deploy.settings import Plan
from undrift.jobs.folder import RunFolder
from undrift.report.load import load

CLIENTS, MBIT, ROUNDS = 4, 20.0, 3


def main() -> None:
    check_can()
    out = Path("runs/namespaces")
    settings = {"algorithm": "scaffold", "dataset": "digits", "model": "mlp", "partition": "dirichlet:0.3", "steps": 20}
    settings |= {"clients": CLIENTS, "cohort": CLIENTS, "rounds": ROUNDS, "eval_every": 1, "device": "cpu"}
    plan = Plan.of(settings | {"out": str(out.resolve()), "set": {"lr": 0.1}})
    # A bridge in the server's namespace, and from each client's namespace a pair of virtual devices to it, limited by tc.
    with links(CLIENTS, MBIT), federation(CLIENTS, host=ADDRESS, within=within) as parts:
        for client in range(CLIENTS):
            parts.start_client(client)  # ip netns exec undrift-client-0 flower-supernode ...
        run, shown = parts.run(plan), 0
        while run.poll() is None:
            lines = [line for line in parts.log("run").splitlines() if "round " in line or "clients are there" in line]
            for line in lines[shown:]:
                print(line, flush=True)
            shown = len(lines)
            time.sleep(0.3)
        if not RunFolder(out).is_finished():
            sys.exit(parts.log("run"))
        print(f"{crossed(CLIENTS):,} bytes crossed the links, both ways, from the first packet on")
    accuracy = load([out])[0].records.column("accuracy")[-1]
    print(f"{CLIENTS} clients behind {MBIT:g} Mbit/s, {ROUNDS} rounds, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
