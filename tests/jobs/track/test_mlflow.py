"""MLflow: its database on this machine, and a real server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import undrift
from tests.small import QUICK

pytest.importorskip("mlflow", reason="mlflow is not installed")


def check_runs(tmp_path: Path, uri: str) -> None:
    """Track a run that is interrupted and resumed, and look at what MLflow holds."""
    from mlflow.tracking import MlflowClient

    out = tmp_path / "mine"
    for record in undrift.rounds(QUICK, rounds=4, eval_every=1, lr=0.1, out=out, track="mlflow"):
        if record["round"] == 2:
            break
    result = undrift.run(QUICK, rounds=5, eval_every=1, lr=0.1, out=out, resume=True)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("undrift")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["stopped"]) == ("mine", "FINISHED", "rounds")
    assert run.data.params["set.lr"] == "0.1" and run.data.params["clients"] == str(QUICK["clients"])
    assert (run.data.params["rounds"], run.data.tags["rounds"]) == ("4", "5")  # a parameter cannot change
    for name in ("accuracy", "bytes_up", "train_loss"):
        read = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))
        assert read == [(record["round"], pytest.approx(record[name])) for record in result.records]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]
    page = Path(client.download_artifacts(run.info.run_id, "report.html", str(tmp_path)))
    assert page.read_bytes() == (out / "report.html").read_bytes()


@pytest.mark.filterwarnings("ignore")  # those of MLflow and its database
@pytest.mark.system
def test_a_database_on_this_machine_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy", reason="MLflow's database needs sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.chdir(tmp_path)  # where artefacts go
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    check_runs(tmp_path, uri)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.system
def test_a_server_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("aiohttp", "flask", "flask_cors", "graphene", "huey", "sqlalchemy", "uvicorn"):
        pytest.importorskip(package, reason=f"MLflow's server needs {package}; pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri, log = f"http://127.0.0.1:{port}", (tmp_path / "log").open("wb")
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'm.db'}", "--artifacts-destination", str(tmp_path / "kept")]
    server = subprocess.Popen([sys.executable, "-m", "mlflow", *words, *store], stdout=log, stderr=log, cwd=tmp_path)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=1).read()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.5)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        check_runs(tmp_path, uri)
    finally:
        server.terminate()
        server.wait(60)
        log.close()


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_away_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match="tracking: mlflow failed"):
        result = undrift.run(QUICK, rounds=2, out=tmp_path / "o", track="mlflow")
    assert len(result.records) == 2
