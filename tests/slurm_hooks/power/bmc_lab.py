"""Tools of the tests of the power programs: a BMC file, a stand-in for scontrol, and emulators of BMCs."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from bmc_emulators import BMC, bmc_env, ipmi_argv, redfish_argv

ROOT = Path(__file__).resolve().parents[3]

REDFISH = """
[[bmc]]
nodes = "n[1-2]"
method = "redfish"
address = "localhost:{port}"
user = "almanac"
password = "dock"
ca_file = "{ca_file}"
system = "{{node}}"
"""
IPMI = """
[[bmc]]
nodes = "n[1-2]"
method = "ipmi"
address = "127.0.0.1:{port}"
user = "almanac"
password = "dock"
cipher_suite = "3"
"""
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
        """Set Slurm's state of each node."""
        lines = (f"NodeName={node} Arch=x86_64 OS=Linux State={state} Reason=x\n" for node, state in states.items())
        new = self.folder / "nodes.new"
        new.write_text("".join(lines))
        new.replace(self.folder / "nodes")

    def bmc(self, text: str, **numbers: object) -> None:
        """Write the BMC file. numbers: its keys above the tables."""
        keys = {"timeout_s": 60, "retries": 0, "soft_s": 0, "log_file": str(self.log), **numbers}
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
            timeout=300,
            process_group=0,
        )

    def run(self, wanted: str, hosts: str, **env: str) -> dict[str, dict[str, object]]:
        """Start a program, wait for its end, and return the lines of its log by node."""
        self.log.unlink(missing_ok=True)
        done = self.start(wanted, hosts, **env)
        assert done.returncode == 0, done.stderr
        return self.wait()

    def wait(self, timeout_s: float = 300) -> dict[str, dict[str, object]]:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            lines = self.lines()
            if any("ended" in line for line in lines):
                return {str(line["node"]): line for line in lines if "node" in line}
            time.sleep(0.05)
        raise AssertionError(f"no end after {timeout_s} s: {self.lines()}")

    def lines(self) -> list[dict[str, object]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be half written


class Bmcs:
    """BMCs of n1 and n2, of either kind, whose power is that of the program `bmc` (docker/bin)."""

    def __init__(self, lab: PowerLab, table: str) -> None:
        self.lab, self.table = lab, table

    def reset(self) -> None:
        """All nodes are on, nothing was told, and the BMC file is right."""
        shutil.rmtree(self.lab.folder / "power", ignore_errors=True)
        (self.lab.folder / "power").mkdir()
        for name in ("told", "slurm_is_lost"):
            (self.lab.folder / name).unlink(missing_ok=True)
        self.lab.states({"n1": POWERING_DOWN, "n2": POWERING_DOWN})
        self.configure()

    def let_hang(self, node: str) -> Path:
        """Let a node ignore soft shutdowns; the file has a line for each."""
        path = self.lab.folder / f"power/{node}.hangs"
        path.touch()
        return path

    def configure(self, old: str = "", new: str = "", **numbers: object) -> None:
        assert old in self.table
        self.lab.bmc(self.table.replace(old, new), **numbers)

    @property
    def told(self) -> list[str]:
        """Orders to the nodes, such as "off n1"."""
        path = self.lab.folder / "told"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def power(self, node: str, *change: str) -> str:
        argv = [BMC, node, *(change or ("status",))]
        env = bmc_env(self.lab.folder, self.lab.folder / "switch")
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split()[-1]


@contextmanager
def server(lab: PowerLab, argv: Sequence[str]) -> Iterator[None]:
    """A BMC emulator that runs in the lab's folder."""
    lab.program("switch", f'#!/bin/sh\necho "$1 $2" >>{lab.folder}/told\n')
    with (lab.folder / "server.log").open("ab") as log:
        env = bmc_env(lab.folder, lab.folder / "switch")
        running = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        running.kill()
        running.wait(300)


@contextmanager
def redfish(lab: PowerLab) -> Iterator[Bmcs]:
    """The BMC of n1 and n2."""
    port = free_port(socket.SOCK_STREAM)
    with server(lab, redfish_argv(lab.folder, "n1,n2", port)):
        wait_for_port(port)
        yield Bmcs(lab, REDFISH.format(port=port, ca_file=lab.folder / "bmc.crt"))


@contextmanager
def ipmi(lab: PowerLab) -> Iterator[Bmcs]:
    """The BMC of n1."""
    if not (shutil.which("ipmi_sim") and shutil.which("ipmitool")):
        pytest.skip("needs ipmi_sim and ipmitool (scripts/packages.sh servers)")
    port = free_port(socket.SOCK_DGRAM)
    with server(lab, ipmi_argv(lab.folder, "n1", port)):
        yield Bmcs(lab, IPMI.format(port=port))


def free_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, timeout_s: float = 300) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port} after {timeout_s} s")
