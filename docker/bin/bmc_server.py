"""The stand-in for a node's BMC: it answers although the node is off, and starts and stops what runs on the node.

GET /power says "on" or "off"; POST /power with the body "on" or "off" switches. A node boots for $BMC_BOOT_S seconds.
Power off is what it is on a real node: jobs there are not asked. The command `bmc` speaks to it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8623
BOOT_S = float(os.environ.get("BMC_BOOT_S", "5"))
SERVICES = ("munged", "exporter", "slurmd")
JOBS = "pkill -KILL slurmstepd; pkill -KILL -u alice,bob; rm -rf /run/almanac/hpc_job"


class Node:
    """The node's power; it is on when its container starts."""

    def __init__(self) -> None:
        self.power = "on"
        self._lock = threading.Lock()
        self._boot = threading.Timer(0, lambda: None)

    def switch(self, power: str) -> None:
        """Does nothing where the node has that power already."""
        with self._lock:
            if power == self.power:
                return
            self.power = power
            self._boot.cancel()
            if power == "on":
                self._boot = threading.Timer(BOOT_S, subprocess.run, [["sv", "up", *SERVICES]])
                self._boot.start()
            else:
                subprocess.run(["sv", "-w", "5", "force-stop", *reversed(SERVICES)], check=False)
                subprocess.run(["sh", "-c", JOBS], check=False)


class Handler(BaseHTTPRequestHandler):
    node = Node()

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/power" else 404, self.node.power)

    def do_POST(self) -> None:
        wanted = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode(errors="replace").strip()
        if self.path != "/power" or wanted not in ("on", "off"):
            self._answer(400, 'POST "on" or "off" to /power')
            return
        self.node.switch(wanted)
        self._answer(200, self.node.power)

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
