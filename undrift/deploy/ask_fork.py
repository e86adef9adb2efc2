"""The program `flwr-clientapp` of a node: lets the process in FOLDER (`fork.py`) run it; where none answers, runs it by itself.

It is a script with the words FOLDER KIND ..., and imports no more than it needs, because it is started for every message.
"""

import os
import socket
import sys

SOCKET = "fork.socket"  # in the folder
TAKEN = b"1"  # the answer


def main() -> None:
    folder, kind, *words = sys.argv[1:]
    here = os.getcwd()
    try:
        os.chdir(folder)  # a socket's whole path may be too long
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(SOCKET)
            socket.send_fds(line, ["\0".join(words).encode()], [1, 2])
            line.shutdown(socket.SHUT_WR)
            if line.recv(1) == TAKEN:
                return
    except OSError:
        pass
    os.chdir(here)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "undrift.deploy.fork", kind, *words])


if __name__ == "__main__":
    main()
