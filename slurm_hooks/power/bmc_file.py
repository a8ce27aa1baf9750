"""The file of the nodes' BMCs: addresses, credentials, and how each node is powered down and up.

Whoever can write this file runs commands as SlurmUser, and it holds passwords: it is refused unless it is a plain file
of mode 0600 that belongs to the user who reads it.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from almanac.errors import ConfigError
from almanac.units import printable
from telemetry.slurm import hostlist

METHODS = ("ipmi", "redfish", "wol", "command")
MAX_BYTES = 1 << 20
_MAC = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")
_ADDRESS = re.compile(r"[A-Za-z0-9_\[{][A-Za-z0-9_.:{}\[\]-]*")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True)
class Bmc:
    """One [[bmc]] table: nodes that are powered in the same way. "{node}" in texts stands for the node's name."""

    nodes: str = ""
    method: str = ""
    address: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    cipher_suite: str = ""
    ca_file: str = ""
    system: str = ""
    broadcast: str = "255.255.255.255"
    mac: Mapping[str, str] = field(default_factory=dict)
    on_command: tuple[str, ...] = ()
    off_command: tuple[str, ...] = ()
    status_command: tuple[str, ...] = ()

    def text(self, template: str, node: str) -> str:
        return template.replace("{node}", node)

    def argv(self, command: tuple[str, ...], node: str) -> list[str]:
        return [self.text(part, node) for part in command]


@dataclass(frozen=True)
class BmcFile:
    """The whole file. soft_s: seconds that a node gets to shut down by itself before its power is cut."""

    by_node: Mapping[str, Bmc]
    parallel: int = 32
    timeout_s: float = 20.0
    retries: int = 2
    soft_s: float = 30.0
    log_file: str = ""


_NUMBERS = {"parallel": (1, 256), "timeout_s": (1, 600), "retries": (0, 10), "soft_s": (0, 3600)}


def open_bmc_file(path: Path) -> int:
    """A descriptor for reading and locking, of a file that nobody else can have written or read.

    Raises ConfigError: no such file, a link, another owner, or a mode other than 0600.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        todo = f"create it as {_user()}, mode 0600 (docs/power-programs.md)"
        raise ConfigError(f"{path}: cannot be opened by {_user()}: {error.strerror}", todo) from error
    info = os.fstat(handle)
    found = ""
    if not stat.S_ISREG(info.st_mode):
        found = "is not a regular file"
    elif info.st_uid != os.geteuid():
        found = f"belongs to uid {info.st_uid}, but the programs run as {_user()}"
    elif stat.S_IMODE(info.st_mode) != 0o600:
        found = f"has mode {stat.S_IMODE(info.st_mode):04o}, expected 0600"
    elif info.st_size > MAX_BYTES:
        found = f"has {info.st_size} bytes, expected at most {MAX_BYTES}"
    if found:
        os.close(handle)
        raise ConfigError(f"{path}: {found}", f"chown {_user()} {path}; chmod 600 {path}; check who wrote it")
    return handle


def read_bmc_file(path: Path, handle: int) -> BmcFile:
    """The file behind a descriptor of open_bmc_file. Raises ConfigError; no message holds a value of the file."""
    try:
        data = tomllib.loads(os.pread(handle, MAX_BYTES, 0).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        place = re.search(r"\(at [^)]*\)", str(error))
        raise ConfigError(f"{path}: not TOML {place[0] if place else ''}".rstrip(), "correct the file") from None
    tables = data.pop("bmc", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: no [[bmc]] table", "add one for each kind of node (docs/power-programs.md)")
    _refuse_unknown(data, {*_NUMBERS, "log_file"}, str(path))
    for name, (low, high) in _NUMBERS.items():
        value = data.get(name, low)
        is_number = isinstance(value, int if name in ("parallel", "retries") else (int, float))
        if not is_number or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{path}: {name} is not a number from {low} to {high}", f"correct {name}")
    log_file = data.get("log_file", "")
    if not isinstance(log_file, str) or (log_file and not log_file.startswith("/")):
        raise ConfigError(f"{path}: log_file is not an absolute path", 'name a file, or "" for syslog')
    by_node: dict[str, Bmc] = {}
    for number, table in enumerate(tables, 1):
        where = f"{path}: [[bmc]] table {number}"
        bmc = _table(table, where)
        for node in node_names(bmc.nodes, where):
            if node in by_node:
                raise ConfigError(f"{where}: {node} is in an earlier table", "give each node one table")
            if bmc.method == "wol" and node not in bmc.mac:
                raise ConfigError(f"{where}: no MAC address for {node}", f'add {node} = "aa:bb:cc:dd:ee:ff" to mac')
            by_node[node] = bmc
    return BmcFile(by_node, **data)


def node_names(text: str, where: str) -> tuple[str, ...]:
    """The nodes of a host list, each safe as an argument and a part of an address. Raises ConfigError."""
    try:
        names = hostlist.expand(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {printable(str(error))}", "write a host list such as gpu[001-064]") from error
    if not names or not all(_NODE.fullmatch(name) for name in names):
        raise ConfigError(
            f"{where}: {printable(text[:80])!r} is not a list of node names", "write a host list such as gpu[001-064]"
        )
    return names


def _table(table: Mapping[str, Any], where: str) -> Bmc:
    kinds = {one.name: one for one in fields(Bmc)}
    _refuse_unknown(table, set(kinds), where)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name.endswith("_command"):
            values[name] = _command(value, f"{where}: {name}")
        elif name == "mac":
            values[name] = _macs(value, where)
        elif not isinstance(value, str) or "\0" in value or "\n" in value:
            raise ConfigError(f"{where}: {name} is not a single line of text", f"correct {name}")
        else:
            values[name] = value
    bmc = Bmc(**values)
    _check(bmc, where)
    return bmc


def _check(bmc: Bmc, where: str) -> None:
    needed = {
        "ipmi": ("address", "user", "password"),
        "redfish": ("address", "user", "password"),
        "wol": ("mac", "off_command"),
        "command": ("on_command", "off_command"),
    }
    if bmc.method not in METHODS:
        raise ConfigError(f"{where}: method is not one of {', '.join(METHODS)}", "correct method")
    for name in needed[bmc.method]:
        if not getattr(bmc, name):
            raise ConfigError(f"{where}: no {name}; method {bmc.method} needs it", "see docs/power-programs.md")
    if bmc.address and not _ADDRESS.fullmatch(bmc.address):
        raise ConfigError(f"{where}: address is not HOST or HOST:PORT", 'write, for example, "bmc-{node}"')
    if bmc.cipher_suite and not re.fullmatch(r"[0-9]{1,2}", bmc.cipher_suite):
        raise ConfigError(f"{where}: cipher_suite is not a number", 'write, for example, "17" or "3", or leave it out')
    if bmc.user.startswith("-") or (bmc.method == "redfish" and ":" in bmc.user):
        raise ConfigError(f"{where}: user begins with - or holds a colon", "use another account of the BMC")


def _command(value: object, where: str) -> tuple[str, ...]:
    parts: list[Any] = value if isinstance(value, list) else []
    if not parts or not all(isinstance(part, str) and "\0" not in part for part in parts):
        raise ConfigError(
            f"{where} is not a list of strings", 'write, for example, ["/usr/local/sbin/power-off", "{node}"]'
        )
    if not parts[0].startswith("/"):
        raise ConfigError(f"{where} does not begin with an absolute path", "write the full path of the program")
    return tuple(parts)


def _macs(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(mac, str) and _MAC.fullmatch(mac) for mac in value.values()):
        raise ConfigError(f"{where}: mac is not a table of MAC addresses", 'write mac = { n1 = "aa:bb:cc:dd:ee:ff" }')
    return value


def _refuse_unknown(data: Mapping[str, Any], valid: set[str], where: str) -> None:
    if unknown := sorted(set(data) - valid):
        raise ConfigError(
            f"{where}: unknown key {printable(unknown[0][:60])}", f"use one of: {', '.join(sorted(valid))}"
        )


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
