"""Runs a node's client app for each message in a fork of a process that has imported PyTorch and Flower once.

A SuperNode starts the program `flwr-clientapp` for each message, and to import all that it needs takes seconds. The program that
stands first on the node's PATH (`ask_fork.py`) sends its words and its output to the process here, over a socket that only the
node's user can reach, and this process forks. As a module:

    python -m undrift.deploy.fork KIND --serve FOLDER    serve until the process that started this one has ended
    python -m undrift.deploy.fork KIND WORD...           be `flwr-clientapp WORD...`
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import torch
from flwr.supernode.cli import flwr_clientapp

from undrift.deploy import only
from undrift.deploy.ask_fork import SOCKET, TAKEN

KINDS = {"own": only.main, "sent": flwr_clientapp}  # undrift's client app whatever was sent, or the app that was sent
LOOK = 1.0  # seconds between two looks whether the process that started this one is there


def serve(folder: Path, kind: str) -> None:
    """Fork for each message until the process that started this one has ended."""
    parent = os.getppid()
    load_more()
    if threading.active_count() > 1:  # a fork has one thread, and what the others held stays locked
        sys.exit("something that was imported has started a thread; client apps are started one by one")
    os.chdir(folder)
    Path(SOCKET).unlink(missing_ok=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that have ended
    gc.freeze()  # so that forks share what is there now
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(SOCKET)
        os.chmod(SOCKET, 0o600)
        door.listen()
        door.settimeout(LOOK)
        while os.getppid() == parent:
            with contextlib.suppress(OSError):
                line, _ = door.accept()
                with line:
                    line.settimeout(LOOK)
                    content, outputs, _, _ = socket.recv_fds(line, 1 << 16, 2)
                    if os.fork() == 0:
                        door.close()
                        take_over(line, outputs)
                        sys.argv = ["flwr-clientapp", *content.decode().split("\0")]
                        KINDS[kind]()
                        sys.exit()
                    for output in outputs:
                        os.close(output)


def load_more() -> None:
    """Import what a client app does not import before it runs: by name, and by a first computation without memory."""
    importlib.import_module(only.LOADER)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for a GPU must not open it: forks could not use it
    nothing = torch.empty(1, device="meta")
    _ = nothing - torch.zeros_like(nothing)


def take_over(line: socket.socket, outputs: list[int]) -> None:
    """In a fork: say that it is there, and write where the program that has asked would write."""
    line.sendall(TAKEN)
    line.close()
    for own, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, own)
        os.close(output)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def main() -> None:
    kind, *words = sys.argv[1:]
    if words[:1] == ["--serve"]:
        serve(Path(words[1]), kind)
    else:
        sys.argv = ["flwr-clientapp", *words]
        KINDS[kind]()


if __name__ == "__main__":
    main()
