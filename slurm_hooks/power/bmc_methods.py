"""The ways to a node's power: IPMI, Redfish, Wake-on-LAN, and a site's own commands.

Each is asked for a node's power and told to change it. Passwords go to ipmitool through its environment, never into
an argument list, which every user of the host can read. No message holds one.
"""

from __future__ import annotations

import os
import socket
from typing import Literal, Protocol

from almanac import bounded
from almanac.errors import ConfigError
from slurm_hooks.power.bmc_file import Bmc
from slurm_hooks.power.redfish import BmcError, Redfish

Wanted = Literal["on", "off", "soft"]
"""soft: ask the operating system to shut down."""
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "USER", "LOGNAME", "SLURM_CONF")
_MOST_BYTES = 1 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Method(Protocol):
    """One node's power. Both raise BmcError."""

    can_soften: bool

    def status(self) -> str | None:
        """ "on", "off", or None where this method cannot tell."""

    def set(self, wanted: Wanted) -> None: ...


def method_of(bmc: Bmc, node: str, timeout_s: float) -> Method:
    if bmc.method == "ipmi":
        return Ipmi(bmc, node, timeout_s)
    if bmc.method == "redfish":
        return Redfish(bmc, node, timeout_s)
    return CommandBmc(bmc, node, timeout_s)


class Ipmi:
    """ipmitool over LAN."""

    can_soften = True

    def __init__(self, bmc: Bmc, node: str, timeout_s: float) -> None:
        host, _, port = bmc.text(bmc.address, node).partition(":")
        self._argv = ["ipmitool", "-I", "lanplus", "-H", host, "-p", port or "623", "-U", bmc.user, "-E"]
        if bmc.cipher_suite:
            self._argv += ["-C", bmc.cipher_suite]
        self._env = {"IPMI_PASSWORD": bmc.password}
        self._timeout_s = timeout_s

    def status(self) -> str | None:
        said = self._run("status")
        for power in ("on", "off"):
            if said.strip().lower() == f"chassis power is {power}":
                return power
        raise BmcError(f"ipmitool says {said.strip()[:80]!r}, expected: Chassis Power is on")

    def set(self, wanted: Wanted) -> None:
        self._run(wanted)

    def _run(self, what: str) -> str:
        return run([*self._argv, "chassis", "power", what], self._timeout_s, self._env)


class CommandBmc:
    """A site's own programs, or Wake-on-LAN: that can only switch on, so off is a program too."""

    can_soften = False

    def __init__(self, bmc: Bmc, node: str, timeout_s: float) -> None:
        self._bmc, self._node, self._timeout_s = bmc, node, timeout_s

    def status(self) -> str | None:
        if not self._bmc.status_command:
            return None
        said = run(self._bmc.argv(self._bmc.status_command, self._node), self._timeout_s).strip()
        if said not in ("on", "off"):
            raise BmcError(f"status_command says {said[:80]!r}, expected on or off")
        return said

    def set(self, wanted: Wanted) -> None:
        if wanted == "on" and self._bmc.method == "wol":
            wake(self._bmc.mac[self._node], self._bmc.broadcast)
            return
        command = self._bmc.on_command if wanted == "on" else self._bmc.off_command
        run(self._bmc.argv(command, self._node), self._timeout_s)


def wake(mac: str, broadcast: str) -> None:
    """Send a magic packet: six bytes FF, then the MAC address 16 times. "host" or "host:port" (9). Raises BmcError."""
    host, _, port = broadcast.partition(":")
    packet = b"\xff" * 6 + bytes.fromhex(mac.replace(":", "").replace("-", "")) * 16
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sender.sendto(packet, (host, int(port or 9)))
    except (OSError, ValueError) as error:
        raise BmcError(f"cannot send a magic packet to {broadcast}: {error}") from error


def run(argv: list[str], timeout_s: float, secrets: dict[str, str] | None = None) -> str:
    """The output of a program; it and all that it started have ended when this returns. Raises BmcError."""
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        done = bounded.run(
            argv, timeout_s=timeout_s, most_bytes=_MOST_BYTES, env={**env, "PATH": PATH, **(secrets or {})}
        )
    except (TimeoutError, ValueError) as error:
        raise BmcError(f"{argv[0]} {error}") from None
    except OSError as error:
        raise BmcError(f"{argv[0]}: {error.strerror}", is_final=True) from error
    except ConfigError as error:
        raise BmcError(f"{error}; {error.hint}", is_final=True) from error
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.code:
        for secret in (secrets or {}).values():
            said = said.replace(secret, "***")
        raise BmcError(f"{argv[0]} failed with exit code {done.code}: {said.strip()[-200:]}")
    return said
