"""The BMCs of a lab's nodes (lab.py): off kills a node's slurmd, on starts it again after two seconds.

As a server: lab_bmc.py serve ROOT PORT, as root. As a client: lab_bmc.py URL status|on|off|broken|mended NODE...
Slurm's programs are the client; what a node's jobs started is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker/bin"))

BOOT_S = 2.0


def ask(url: str, wanted: str, nodes: list[str]) -> None:
    """Says what each node's power is, after the change where one is wanted."""
    body = None if wanted == "status" else wanted.encode()
    for node in nodes:
        with urllib.request.urlopen(f"{url}/power/{node}", data=body, timeout=30) as answer:
            print(node, answer.read().decode().strip(), flush=True)


def _start(root: Path, node: str) -> None:
    with (root / f"log/slurmd.{node}.out").open("ab") as log:
        # -b: the node has just booted.
        slurmd = subprocess.Popen(["slurmd", "-D", "-b", "-N", node], cwd=root / "log", stdout=log, stderr=log)
    slurmd.wait()


def _stop(root: Path, node: str) -> None:
    pid_file = root / f"spool/slurmd.{node}.pid"
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        pid_file.unlink()  # a number that comes again would be another's
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    if sys.argv[1] != "serve":
        ask(sys.argv[1], sys.argv[2], sys.argv[3:])
        return
    from bmc_server import Handler, Machine, serve
    from layout import NODES

    root = Path(sys.argv[2])
    Handler.machines = {
        node: Machine(lambda node=node: _start(root, node), lambda node=node: _stop(root, node), BOOT_S)  # type: ignore[misc]
        for node in NODES
    }
    serve(int(sys.argv[3]), Handler, host="127.0.0.1")
    threading.Event().wait()


if __name__ == "__main__":
    main()
