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
Run the server's commands in this folder.

## Keys

On the server, a certificate for its address and a key for each client (P-384), in `keys/`:

```sh
undrift deploy keys keys --host {host} --clients {clients}
```

Give client i the files `ca.crt` and `client-i` and keep `server.key` and the other keys to yourself.

## The server

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=$PWD/flwr
flower-superlink --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \\
  --enable-supernode-auth --host 0.0.0.0 --port {port} --database state.db --disable-runtime-dependency-installation
```

In another terminal, write its address down and register the clients, each once:

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=$PWD/flwr
mkdir -p $FLWR_HOME
cat > $FLWR_HOME/config.toml <<END
[superlink.federation]
address = "{host}:{port}"
root-certificates = "$PWD/keys/ca.crt"
END
for i in $(seq 0 {last}); do flwr supernode register keys/client-$i.pub federation; done
```

## Client i

```sh
export FLWR_TELEMETRY_ENABLED=0
flower-supernode --superlink {host}:{port} --root-certificates ca.crt --auth-supernode-private-key client-i \\
  --node-config '{who} state-dir="/var/lib/undrift"'
```

The server turns away a node that is not registered, and the node ends. Let something start it again, such as systemd with
`Restart=always`. Several nodes on one machine need a `--port` each, such as 9095.
{site_files}
## The run

In the server's other terminal:

```sh
flwr run . federation --stream
```

It waits for all clients, at most `wait` seconds, and writes to the folder `out` (see `pyproject.toml`). After a crash:

```sh
flwr run . federation --stream --run-config 'resume=true'
```
"""
SITE_FILES = """
`data` is the client's file, which stays where it is: an .npz of plain arrays with `x_train` and `y_train`, or `x` and `y`,
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
            "flwr": {"app": {"publisher": "undrift", "components": components, "config": plan.flat()}},
        },
    }  # fmt: skip
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    who, samples, site_files = 'name="NAME"' if plan.deploy.names else "partition-id=i", "each the data set", ""
    if plan.site_files:
        who, samples = f'{who} data="/path/to/site.npz"', "each client a file with its own samples"
        targets = MASKS if plan.structures else LABELS
        targets = targets.format(last=plan.classes - 1, structures=", ".join(plan.structures))
        site_files = SITE_FILES.format(targets=targets, shape=plan.deploy.shape)
    text = README.format(
        name=name, who=who, host=host, port=port, last=run.clients - 1, site_files=site_files, samples=samples,
        algorithm=run.algorithm, dataset=data, clients=run.clients, cohort=run.cohort,
    )  # fmt: skip
    (folder / "README.md").write_text(text)
