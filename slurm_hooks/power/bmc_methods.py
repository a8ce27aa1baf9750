"""The ways to a node's power: IPMI by ipmitool, Redfish by sushy, and a site's own commands.

Each is asked for a node's power and told to change it. Passwords go to ipmitool through its environment, never into
an argument list, which every user of the host can read. No message holds one.
"""

from __future__ import annotations

import os
from typing import Literal, Protocol

from almanac import bounded
from almanac.errors import ConfigError
from slurm_hooks.power.bmc_file import BmcError, CommandTable, IpmiTable, RedfishTable, Table

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


def method_of(bmc: Table, node: str, timeout_s: float) -> Method:
    if isinstance(bmc, RedfishTable):
        from slurm_hooks.power.redfish import Redfish  # late: sushy takes 0.2 s

        return Redfish(bmc, node, timeout_s)
    return Ipmi(bmc, node, timeout_s) if isinstance(bmc, IpmiTable) else CommandBmc(bmc, node, timeout_s)


class Ipmi:
    """ipmitool over LAN."""

    can_soften = True

    def __init__(self, bmc: IpmiTable, node: str, timeout_s: float) -> None:
        host, _, port = bmc.address.replace("{node}", node).partition(":")
        self._argv = ["ipmitool", "-I", "lanplus", "-H", host, "-p", port or "623", "-U", bmc.user, "-E"]
        self._argv += ["-C", bmc.cipher_suite] if bmc.cipher_suite else []
        self._password, self._timeout_s = bmc.password, timeout_s

    def status(self) -> str | None:
        said = self._run("status").strip()
        power = said.lower().removeprefix("chassis power is ")
        if power not in ("on", "off"):
            raise BmcError(f"ipmitool says {said[:80]!r}, expected: Chassis Power is on")
        return power

    def set(self, wanted: Wanted) -> None:
        self._run(wanted)

    def _run(self, what: str) -> str:
        return run([*self._argv, "chassis", "power", what], self._timeout_s, self._password)


class CommandBmc:
    """A site's own programs."""

    can_soften = False

    def __init__(self, bmc: CommandTable, node: str, timeout_s: float) -> None:
        self._bmc, self._node, self._timeout_s = bmc, node, timeout_s

    def status(self) -> str | None:
        if not self._bmc.status_command:
            return None
        said = self._run(self._bmc.status_command).strip()
        if said not in ("on", "off"):
            raise BmcError(f"status_command says {said[:80]!r}, expected on or off")
        return said

    def set(self, wanted: Wanted) -> None:
        self._run(self._bmc.on_command if wanted == "on" else self._bmc.off_command)

    def _run(self, command: tuple[str, ...]) -> str:
        return run([part.replace("{node}", self._node) for part in command], self._timeout_s)


def run(argv: list[str], timeout_s: float, password: str = "") -> str:
    """The output of a program; it and all that it started have ended when this returns. Raises BmcError."""
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PATH": PATH}
    if password:
        env["IPMI_PASSWORD"] = password
    try:
        done = bounded.run(argv, timeout_s=timeout_s, most_bytes=_MOST_BYTES, env=env)
    except (TimeoutError, ValueError) as error:
        raise BmcError(f"{argv[0]} {error}") from None
    except OSError as error:
        raise BmcError(f"{argv[0]}: {error.strerror}", is_final=True) from error
    except ConfigError as error:
        raise BmcError(f"{error}; {error.hint}", is_final=True) from error
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.code:
        shown = said.replace(password, "***") if password else said
        raise BmcError(f"{argv[0]} failed with exit code {done.code}: {shown.strip()[-200:]}")
    return said
