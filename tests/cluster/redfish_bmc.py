"""BMCs that speak Redfish: sushy-tools' emulator, where the program docker/bin/bmc holds the power of the nodes.

redfish_bmc.py FOLDER BMC NODE,NODE... PORT: with FOLDER/bmc.crt and bmc.key, for user "almanac", password "dock".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bcrypt
from sushy_tools.emulator.main import app, main
from sushy_tools.emulator.resources.systems import fakedriver

RESETS = {"On": ("power", "1"), "ForceOff": ("power", "0"), "GracefulShutdown": ("shutdown", "1")}


class NodeDriver(fakedriver.FakeDriver):  # type: ignore[misc]
    """sushy-tools' own fake changes the power some seconds later, by chance, and of nothing."""

    program = ""

    def get_power_state(self, identity: str) -> str:
        return "On" if self._bmc(identity, "get", "power") == "power:1" else "Off"

    def set_power_state(self, identity: str, state: str) -> None:
        self._bmc(identity, "set", *RESETS[state])

    def _bmc(self, *argv: str) -> str:
        return subprocess.run([self.program, *argv], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    place, bmc, nodes, port = sys.argv[1:]
    folder = Path(place)
    (folder / "htpasswd").write_text(f"almanac:{bcrypt.hashpw(b'dock', bcrypt.gensalt(4)).decode()}\n")
    app.configure(
        extra_config={
            "SUSHY_EMULATOR_AUTH_FILE": str(folder / "htpasswd"),
            "SUSHY_EMULATOR_STATE_DIR": str(folder),
            "SUSHY_EMULATOR_FAKE_SYSTEMS": [{"uuid": node, "name": node, "nics": []} for node in nodes.split(",")],
            "SUSHY_EMULATOR_FEATURE_SET": "minimum",
            "SUSHY_EMULATOR_SSL_CERT": str(folder / "bmc.crt"),
            "SUSHY_EMULATOR_SSL_KEY": str(folder / "bmc.key"),
        }
    )
    NodeDriver.program = bmc
    fakedriver.FakeDriver = NodeDriver
    sys.argv[1:] = ["--fake", "--interface", "127.0.0.1", "--port", port]
    main()
