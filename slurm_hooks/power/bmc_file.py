"""The file of the nodes' BMCs: addresses, credentials, and how each node is powered down and up.

Whoever can write this file runs commands as SlurmUser, and it holds passwords: it is refused unless it is a plain file
of mode 0600 that belongs to SlurmUser.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert

from almanac.errors import ConfigError
from almanac.units import printable
from slurm import hostlist

MAX_BYTES = 1 << 20
_ADDRESS = re.compile(r"[A-Za-z0-9_\[{][A-Za-z0-9_.:{}\[\]-]*")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
Given = Annotated[str, Meta(min_length=1)]
Command = Annotated[tuple[str, ...], Meta(min_length=1)]


class BmcError(Exception):
    """A fault of a BMC, or its silence. is_final: another try would fail in the same way."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Bmc(Struct, frozen=True, forbid_unknown_fields=True, tag_field="method"):
    """One [[bmc]] table: nodes that are powered in the same way. "{node}" in texts stands for the node's name."""

    nodes: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nodes!r})"  # without the password


class IpmiTable(Bmc, frozen=True, tag="ipmi"):
    """Nodes whose BMCs ipmitool reaches."""

    address: Given
    user: Given
    password: Given
    cipher_suite: Annotated[str, Meta(pattern="^([0-9]{1,2})?$")] = ""


class RedfishTable(Bmc, frozen=True, tag="redfish"):
    """Nodes whose BMCs speak Redfish. ca_file: "" for the authorities of the system."""

    address: Given
    user: Given
    password: Given
    ca_file: str = ""
    system: str = ""


class CommandTable(Bmc, frozen=True, tag="command"):
    """Nodes that the site's own programs switch."""

    on_command: Command
    off_command: Command
    status_command: tuple[str, ...] = ()


Table = IpmiTable | RedfishTable | CommandTable


class BmcFile(Struct, dict=True, forbid_unknown_fields=True):
    """The whole file. soft_s: seconds that a node gets to shut down by itself before its power is cut."""

    bmc: Annotated[tuple[Table, ...], Meta(min_length=1)]
    parallel: Annotated[int, Meta(ge=1, le=256)] = 32
    timeout_s: Annotated[float, Meta(ge=1, le=600)] = 20.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    soft_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    log_file: Annotated[str, Meta(pattern="^(/.*)?$")] = ""

    @cached_property
    def by_node(self) -> dict[str, Table]:
        """The table of each node. Raises ConfigError."""
        found: dict[str, Table] = {}
        for number, bmc in enumerate(self.bmc):
            where = f"bmc[{number}]"
            _check(bmc, where)
            for node in node_names(bmc.nodes, where):
                if node in found:
                    raise ConfigError(f"{where}: {node} is in an earlier table", "give each node one table")
                found[node] = bmc
        return found


def open_bmc_file(path: Path, owner: int | None = None, flags: int = os.O_RDWR) -> int:
    """A descriptor for reading and locking, of a file that nobody else can have written or read.

    owner: uid of SlurmUser; None: of the caller. Raises ConfigError: no such file, a link, another owner, or a mode
    other than 0600.
    """
    owner = os.geteuid() if owner is None else owner
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        todo = f"create it as {_name(owner)}, mode 0600 (docs/power-programs.md)"
        raise ConfigError(f"{path}: cannot be opened by {_name(os.geteuid())}: {error.strerror}", todo) from error
    info = os.fstat(handle)
    found = ""
    if not stat.S_ISREG(info.st_mode):
        found = "is not a regular file"
    elif info.st_uid != owner:
        found = f"belongs to uid {info.st_uid}, but the programs run as {_name(owner)}"
    elif stat.S_IMODE(info.st_mode) != 0o600:
        found = f"has mode {stat.S_IMODE(info.st_mode):04o}, expected 0600"
    elif info.st_size > MAX_BYTES:
        found = f"has {info.st_size} bytes, expected at most {MAX_BYTES}"
    if found:
        os.close(handle)
        raise ConfigError(f"{path}: {found}", f"chown {_name(owner)} {path}; chmod 600 {path}; check who wrote it")
    return handle


def read_bmc_file(path: Path, handle: int) -> BmcFile:
    """The file behind a descriptor of open_bmc_file. Raises ConfigError; no message holds a secret of the file."""
    try:
        data = tomllib.loads(os.pread(handle, MAX_BYTES, 0).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        place = re.search(r"\(at [^)]*\)", str(error))
        raise ConfigError(f"{path}: not TOML {place[0] if place else ''}".rstrip(), "correct the file") from None
    try:
        file = convert(data, BmcFile)
        file.by_node  # noqa: B018 - reads the host lists
    except ValidationError as error:
        said = printable(str(error).replace("`$.", "`")[:200])
        raise ConfigError(f"{path}: {said}", "correct the file; docs/power-programs.md lists its keys") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from None
    return file


def node_names(text: str, where: str) -> tuple[str, ...]:
    """The nodes of a host list, each safe as an argument and a part of an address. Raises ConfigError."""
    todo = "write a host list such as gpu[001-064]"
    try:
        names = hostlist.expand(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {printable(str(error))}", todo) from error
    if not names or not all(_NODE.fullmatch(name) for name in names):
        raise ConfigError(f"{where}: {printable(text[:80])!r} is not a list of node names", todo)
    return names


def _check(bmc: Table, where: str) -> None:
    for name in bmc.__struct_fields__:
        value = getattr(bmc, name)
        if isinstance(value, str) and ("\0" in value or "\n" in value):
            raise ConfigError(f"{where}: {name} is not a single line of text", f"correct {name}")
        if name.endswith("_command") and value and not value[0].startswith("/"):
            todo = 'write the full path of the program, for example ["/usr/local/sbin/power-off", "{node}"]'
            raise ConfigError(f"{where}: {name} does not begin with an absolute path", todo)
    if isinstance(bmc, CommandTable):
        return
    if not _ADDRESS.fullmatch(bmc.address):
        raise ConfigError(f"{where}: address is not HOST or HOST:PORT", 'write, for example, "bmc-{node}"')
    if bmc.user.startswith("-") or (isinstance(bmc, RedfishTable) and ":" in bmc.user):
        raise ConfigError(f"{where}: user begins with - or holds a colon", "use another account of the BMC")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
