"""What the tests of the power programs work with: a BMC file, a stand-in for scontrol, and BMCs that speak Redfish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "docker/bin"))

from bmc_server import Handler, Machine, serve  # noqa: E402

SCONTROL = """#!/bin/sh
echo "$@" >>{folder}/asked
[ ! -e {folder}/slurm_is_lost ] || {{ echo "slurm_load_node error: Unable to contact slurm controller" >&2; exit 1; }}
cat {folder}/nodes
"""
POWERING_DOWN = "IDLE+POWERING_DOWN"


class PowerLab:
    """A folder with everything that a program needs; run() starts it as Slurm does and waits for its background."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "power.jsonl"
        self.bmc_file = folder / "bmc.toml"
        self.program("scontrol", SCONTROL.format(folder=folder))
        self.config = folder / "almanac.toml"
        self.config.write_text(f'[slurm]\nbin_dir = "{folder}"\n[power]\nbmc_file = "{self.bmc_file}"\n')
        self.states({"n1": POWERING_DOWN, "n2": POWERING_DOWN})

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def states(self, states: Mapping[str, str]) -> None:
        """What Slurm says of each node."""
        lines = (f"NodeName={node} Arch=x86_64 OS=Linux State={state} Reason=x\n" for node, state in states.items())
        new = self.folder / "nodes.new"
        new.write_text("".join(lines))
        new.replace(self.folder / "nodes")

    def bmc(self, text: str, **numbers: object) -> None:
        """Write the BMC file. numbers: its keys above the tables."""
        keys = {"timeout_s": 5, "retries": 0, "soft_s": 0, "log_file": str(self.log), **numbers}
        self.bmc_file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + text)
        self.bmc_file.chmod(0o600)

    def start(self, wanted: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program as Slurm does: no PATH, in a process group of its own; its background goes on."""
        code = f'import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.power_programs import main; main("{wanted}")'
        return subprocess.run(
            [sys.executable, "-I", "-c", code, *arguments],
            env={"ALMANAC_CONFIG": str(self.config), **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            process_group=0,
        )

    def run(self, wanted: str, hosts: str, timeout_s: float = 60, **env: str) -> dict[str, dict[str, object]]:
        """Start a program, wait for its end, and return the lines of its log by node."""
        self.log.unlink(missing_ok=True)
        done = self.start(wanted, hosts, **env)
        assert done.returncode == 0, done.stderr
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60) -> dict[str, dict[str, object]]:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            lines = self.lines()
            if any("ended" in line for line in lines):
                return {str(line["node"]): line for line in lines if "node" in line}
            time.sleep(0.05)
        raise AssertionError(f"no end after {timeout_s} s: {self.lines()}")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


class Bmcs:
    """BMCs of n1 and n2, one Redfish service for both; `wanted` counts what they were told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        lock = threading.Lock()

        def told(what: str) -> None:
            with lock:
                self.told.append(what)

        def machine(name: str) -> Machine:
            return Machine(lambda: told(f"{name} on"), lambda: told(f"{name} off"), boot_s=0.0)

        self.machines = {name: machine(name) for name in ("n1", "n2")}
        self.handler = type("Handler", (Handler,), {"machines": self.machines, "login": "almanac:s3cret"})
        self.handler.log_message = lambda *_: None  # type: ignore[method-assign]


@contextmanager
def redfish(folder: Path, name: str = "localhost") -> Iterator[tuple[Bmcs, int, Path]]:
    """Running BMCs, their port, and the certificate that they are known by, which is of host `name`."""
    key, certificate, both = (folder / part for part in ("key.pem", "bmc-ca.crt", "both.pem"))
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=bmc", "-addext", f"subjectAltName=DNS:{name}"]
    argv = ["openssl", "req", "-x509", *kind, *names, "-keyout", key, "-out", certificate]
    subprocess.run(argv, check=True, capture_output=True, env={"PATH": os.environ["PATH"]})
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    bmcs = Bmcs()
    server = serve(0, bmcs.handler, host="127.0.0.1", certificate=both)
    try:
        yield bmcs, server.server_address[1], certificate
    finally:
        server.shutdown()
        server.server_close()
