"""A stand-in for nodes' BMCs: it answers although the node is off, and starts and stops what runs on the node.

Two ways in, with the same power behind them. Plain HTTP, for the command `bmc`: GET /power answers "on" or "off", POST
/power with "on" or "off" switches; "broken" lets the node never boot again and "mended" ends that. Redfish:
/redfish/v1 with one ComputerSystem per node, its Reset action, and HTTP basic authentication where a password is set.
A node boots for $BMC_BOOT_S seconds. Power off is what it is on a real node: jobs there are not asked.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, REDFISH_PORT = 8623, 8443
BOOT_S = float(os.environ.get("BMC_BOOT_S", "5"))
SERVICES = ("munged", "exporter", "slurmd")
JOBS = "pkill -KILL slurmstepd; pkill -KILL -u alice,bob; rm -rf /run/almanac/hpc_job"
ROOT = "/redfish/v1"
RESETS = ("On", "ForceOff", "GracefulShutdown", "ForceRestart")


class Machine:
    """A node's power; it is on at first."""

    def __init__(self, start: Callable[[], object], stop: Callable[[], object], boot_s: float = BOOT_S) -> None:
        self.power = "on"
        self.is_broken = False
        self._start, self._stop, self._boot_s = start, stop, boot_s
        self._lock = threading.Lock()
        self._boot = threading.Timer(0, lambda: None)

    def switch(self, power: str) -> None:
        """Does nothing where the node has that power already."""
        with self._lock:
            if power == self.power:
                return
            self.power = power
            self._boot.cancel()
            if power == "off":
                self._stop()
            elif not self.is_broken:
                self._boot = threading.Timer(self._boot_s, self._start)
                self._boot.start()


class Handler(BaseHTTPRequestHandler):
    """`machines` by node name; `login` is "user:password", "" asks for none.

    fault: what a test makes go wrong: "drop", an HTTP status, "slow SECONDS", or "" for nothing.
    """

    machines: Mapping[str, Machine] = {}
    login = ""
    fault = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve("")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode(errors="replace").strip())

    def _serve(self, body: str) -> None:
        if self.fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.fault.isdigit():
            self._answer(int(self.fault), "fault")
        else:
            time.sleep(float(self.fault.removeprefix("slow ") or 0))
            self._redfish(body) if self.path.startswith(ROOT) else self._plain(body)

    def _plain(self, body: str) -> None:
        names = [self.path.removeprefix("/power/")] if self.path != "/power" else list(self.machines)
        machine = self.machines.get(names[0]) if len(names) == 1 else None
        if machine is None or (self.command == "POST") != (body in ("on", "off", "broken", "mended")):
            self._answer(400, 'GET /power/NODE, or POST "on", "off", "broken" or "mended" there')
            return
        if body in ("broken", "mended"):
            machine.is_broken = body == "broken"
        elif body:
            machine.switch(body)
        self._answer(200, machine.power)

    def _redfish(self, body: str) -> None:
        path = self.path.rstrip("/")
        if path == ROOT:
            self._json({"RedfishVersion": "1.6.0", "Systems": {"@odata.id": f"{ROOT}/Systems"}})
        elif self.login and self.headers.get("Authorization") != _basic(self.login):
            self._answer(401, "who are you?")
        elif path == f"{ROOT}/Systems":
            self._json({"Members": [{"@odata.id": f"{ROOT}/Systems/{name}"} for name in self.machines]})
        else:
            self._system(path.removeprefix(f"{ROOT}/Systems/"), body)

    def _system(self, path: str, body: str) -> None:
        name, _, action = path.partition("/")
        machine = self.machines.get(name)
        if machine is None or action not in ("", "Actions/ComputerSystem.Reset"):
            self._answer(404, "no such resource")
        elif not action:
            reset = {"target": f"{self.path}/Actions/ComputerSystem.Reset", "ResetType@Redfish.AllowableValues": RESETS}
            self._json({"PowerState": machine.power.title(), "Actions": {"#ComputerSystem.Reset": reset}})
        elif json.loads(body)["ResetType"] not in RESETS:
            self._answer(400, "no such reset type")
        else:
            machine.switch("on" if json.loads(body)["ResetType"] == "On" else "off")
            self.send_response(204)
            self.end_headers()

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value), "application/json")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


def serve(port: int, handler: type[Handler], host: str = "", certificate: Path | None = None) -> ThreadingHTTPServer:
    """A server that answers in a thread of its own; with a certificate, which holds the key too, it speaks TLS."""
    server = ThreadingHTTPServer((host, port), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _start_services() -> None:
    subprocess.run(["sv", "up", *SERVICES], check=False)


def _stop_services() -> None:
    subprocess.run(["sv", "-w", "5", "force-stop", *reversed(SERVICES)], check=False)
    subprocess.run(["sh", "-c", JOBS], check=False)


if __name__ == "__main__":
    Handler.machines = {socket.gethostname(): Machine(_start_services, _stop_services)}
    Handler.login = os.environ.get("BMC_LOGIN", "almanac:dock")
    if (pem := Path("/usr/local/share/cluster/bmc.pem")).exists():
        serve(REDFISH_PORT, Handler, certificate=pem)
    serve(PORT, Handler)
    threading.Event().wait()
