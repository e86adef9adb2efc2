"""`undrift deploy init`: a Flower app in a folder, which `flwr run` starts on a federation."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from undrift import __version__
from undrift.core.errors import BadSetting
from undrift.deploy.settings import Plan

APP = '''"""{about}, by undrift."""

from undrift.deploy.flower import {name}

app = {name}()
'''
SERVER = "The server: seeded cohorts, rounds, checkpoints and records"
CLIENT = "A client: the local steps of the algorithm that pyproject.toml names"
README = """# {name}

{algorithm} on {dataset} with {clients} clients, {cohort} of them a round: a Flower app made by `undrift deploy init`.
Its settings stand in `pyproject.toml`. Server and clients need `pip install 'undrift[flower]'`, and {samples}.

## The server

Its folder, `../{name}-server` here, holds the keys, Flower's database and its files; keep it out of the app, and to yourself.
Make an authority and a certificate for the server's address, once, and serve:

```sh
undrift deploy keys ../{name}-server --host {host}
undrift deploy server ../{name}-server --listen 0.0.0.0:{port}
```

Clients reach port {port}, and there Flower's Fleet API alone. Flower's other APIs, by which anybody may run code on the server
and on all clients, are on loopback: let nobody log in on this machine whom you do not trust with that.

## A client

On its own machine it makes its own key; its name is {names}:

```sh
undrift deploy identity client --name {example}
```

It sends `client/client.pub` to the operator, and reads the fingerprint to them over another channel, such as the telephone.
`client/client.key` stays where it is. The operator admits the key, also while the server runs, and sends back `ca.crt`:

```sh
undrift deploy admit ../{name}-server --key client.pub
```

With `ca.crt` in its folder, the client takes part:

```sh
undrift deploy node client --server {host}:{port}{data}
```

What it keeps between rounds is in `client/states`. A node that may not come in ends and says why: let something start it again,
such as systemd with `Restart=always`. To take a key away for good, or to renew the certificate, which holds for a year, also
while the server runs:

```sh
undrift deploy revoke ../{name}-server --name {example}
undrift deploy keys ../{name}-server --renew
```
{site_files}
## The run

In another terminal of the server:

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=$(realpath ../{name}-server)/flwr
flwr run . federation --stream
```

It waits for all clients, at most `wait` seconds, and writes to the folder `out` (see `pyproject.toml`), which is counted from the
folder in which the server was started. After a crash:

```sh
flwr run . federation --stream --run-config 'resume=true'
```
"""
SITE_FILES = """
`--data` is the client's file, which stays where it is: an .npz of plain arrays with `x_train` and `y_train`, or `x` and `y`,
all of which it trains on (`split` [n] may say train, val or test for each). Pictures are uint8 [n, height, width] or
[n, height, width, channels] and are scaled to 0..1; other inputs go in as they are.
{targets} In Python:

```python
np.savez("site.npz", x=inputs, y=targets)
```

The server learns how many training samples a client has, the shape of one input ({shape} as the model sees it) and the
highest label, and turns away a client that does not fit. To score the model the server needs test samples: give it
`x_test` and `y_test`, or `x` and `y`, in an .npz, as `test` in `pyproject.toml`; without one there are no scores.
"""
LABELS = "Targets are class labels [n] from 0 to {last}."
MASKS = "Targets are masks [n, height, width]: 0 for background, then {structures} from the outside in."


def write_app(folder: Path, plan: Plan, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Write the app into a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise BadSetting(f"{folder} is not empty; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in folder.resolve().name.lower()).strip("-") or "federation"
    package = name.replace("-", "_")
    package = package if package.isidentifier() else f"app_{package}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    for file, about in (("server_app", SERVER), ("client_app", CLIENT)):
        (folder / package / f"{file}.py").write_text(APP.format(about=about, name=file))
    run, data = plan.run, "files of their own" if plan.site_files else plan.run.dataset
    components = {"serverapp": f"{package}.server_app:app", "clientapp": f"{package}.client_app:app"}
    project = {
        "project": {
            "name": name, "version": "1.0.0", "description": f"{run.algorithm} on {data}, by undrift",
            "license": "Apache-2.0", "dependencies": [f"undrift[flower]>={__version__}"],
        },
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            # Nothing but the app is sent to the nodes, whatever else comes to lie in this folder.
            "flwr": {
                "app": {
                    "publisher": "undrift", "fab-include": [f"{package}/*.py"], "components": components,
                    "config": plan.flat(),
                }
            },
        },
    }  # fmt: skip
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    samples, file, site_files = "each the data set", "", ""
    if plan.site_files:
        samples, file = "each client a file with its own samples", " --data /path/to/site.npz"
        targets = MASKS if plan.structures else LABELS
        targets = targets.format(last=plan.classes - 1, structures=", ".join(plan.structures))
        site_files = SITE_FILES.format(targets=targets, shape=plan.deploy.shape)
    numbers = f"its number, from 0 to {run.clients - 1}"
    text = README.format(
        name=name, host=host, port=port, site_files=site_files, samples=samples, data=file, example=plan.names[0],
        names=f"one of {', '.join(plan.names)}" if plan.deploy.names else numbers,
        algorithm=run.algorithm, dataset=data, clients=run.clients, cohort=run.cohort,
    )  # fmt: skip
    (folder / "README.md").write_text(text)
