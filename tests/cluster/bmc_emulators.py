"""Emulators of BMCs: OpenIPMI's ipmi_sim, and that of sushy-tools for Redfish. User "almanac", password "dock".

The program docker/bin/bmc holds the power of the nodes. As a command, this is the BMC that speaks Redfish:
bmc_emulators.py FOLDER NODE,NODE... PORT
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCKER = Path(__file__).resolve().parents[2] / "docker"
BMC = DOCKER / "bin/bmc"
RESETS = {"On": ("power", "1"), "ForceOff": ("power", "0"), "GracefulShutdown": ("shutdown", "1")}


def bmc_env(folder: Path, switch: Path) -> dict[str, str]:
    """The environment of emulators and of `bmc`. switch: the program that starts and stops what runs on a node."""
    return {"PATH": os.environ["PATH"], "BMC_FOLDER": str(folder / "power"), "BMC_SWITCH": str(switch)}


def ipmi_argv(folder: Path, node: str, port: int) -> list[str]:
    """The command of a BMC that speaks IPMI."""
    text = (DOCKER / "etc/ipmi_sim.conf").read_text()
    for name, value in {"NODE": node, "ADDRESS": "127.0.0.1", "PORT": str(port), "BMC": str(BMC)}.items():
        text = text.replace(f"@{name}@", value)
    (folder / "ipmi_sim.conf").write_text(text)
    files = ["-c", folder / "ipmi_sim.conf", "-f", DOCKER / "etc/ipmi_sim.emu", "-s", folder]
    return ["ipmi_sim", "-n", *map(str, files)]


def redfish_argv(folder: Path, nodes: str, port: int) -> list[str]:
    """The command of a BMC that speaks Redfish."""
    make_certificate(folder)
    return [sys.executable, __file__, str(folder), nodes, str(port)]


def make_certificate(folder: Path) -> None:
    """bmc.crt and bmc.key, of localhost."""
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "9", "-subj", "/CN=bmc"]
    files = ["-keyout", folder / "bmc.key", "-out", folder / "bmc.crt"]
    argv = ["openssl", "req", "-x509", *kind, "-addext", "subjectAltName=DNS:localhost", *files]
    subprocess.run(argv, check=True, capture_output=True, env={"PATH": os.environ["PATH"]})


def serve_redfish(folder: Path, nodes: str, port: str) -> None:
    import bcrypt
    from sushy_tools.emulator.main import app, main
    from sushy_tools.emulator.resources.systems import fakedriver

    def bmc(*argv: str) -> str:
        return subprocess.run([BMC, *argv], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()

    class NodeDriver(fakedriver.FakeDriver):  # type: ignore[misc]
        """sushy-tools' own fake changes the power some seconds later, by chance, and of nothing."""

        def get_power_state(self, identity: str) -> str:
            return "On" if bmc(identity, "get", "power") == "power:1" else "Off"

        def set_power_state(self, identity: str, state: str) -> None:
            bmc(identity, "set", *RESETS[state])

    (folder / "htpasswd").write_text(f"almanac:{bcrypt.hashpw(b'dock', bcrypt.gensalt(4)).decode()}\n")
    settings: dict[str, Any] = {
        "AUTH_FILE": str(folder / "htpasswd"), "STATE_DIR": str(folder), "FEATURE_SET": "minimum",
        "SSL_CERT": str(folder / "bmc.crt"), "SSL_KEY": str(folder / "bmc.key"),
        "FAKE_SYSTEMS": [{"uuid": node, "name": node, "nics": []} for node in nodes.split(",")],
    }  # fmt: skip
    app.configure(extra_config={f"SUSHY_EMULATOR_{name}": value for name, value in settings.items()})
    fakedriver.FakeDriver = NodeDriver
    sys.argv[1:] = ["--fake", "--interface", "127.0.0.1", "--port", port]
    main()


if __name__ == "__main__":
    serve_redfish(Path(sys.argv[1]), *sys.argv[2:])
