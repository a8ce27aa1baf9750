"""The file with the NodeName lines that slurm.conf includes. Only `Gres=` of a node's own line is ever changed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import ConfigError
from slurm_hooks.mig.layouts import with_gpus
from telemetry.store.atomic import writing

MAX_BYTES = 8 << 20
_LINE = re.compile(r"(?i)\s*NodeName\s*=\s*(?P<names>[^\s#]+)(?P<rest>.*)")
_GRES = re.compile(r"(?i)(?P<key>\sGres\s*=\s*)(?P<value>[^\s#]*)")
HOW = "give each node that almanac may change a NodeName line of its own in this file (docs/mig.md)"


@dataclass(frozen=True)
class IncludeFile:
    """A site's include file, on this host."""

    path: Path

    def read(self) -> str:
        """Raises ConfigError where it cannot be read."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise ConfigError(f"{self.path} is no file", HOW)
                return file.read(MAX_BYTES).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}", HOW) from error

    def write(self, text: str) -> None:
        """Replace the file, with its mode and owner; it is on disk when this returns. Raises StoreError."""
        target = self.path.resolve()
        new = target.with_name(f".{target.name}.almanac")
        with writing(target):
            known = target.stat()
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(handle, "wb") as file:  # noqa: PTH123 - of a descriptor
                file.write(text.encode("utf-8", "surrogateescape"))
                os.fchmod(handle, stat.S_IMODE(known.st_mode))
                if os.geteuid() == 0:
                    os.fchown(handle, known.st_uid, known.st_gid)
                file.flush()
                os.fsync(handle)
            new.replace(target)
            folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def gres_of_nodes(text: str) -> dict[str, str]:
    """Gres of each node that has a line of its own; nodes of a hostlist are left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) and re.fullmatch(r"[A-Za-z0-9_.-]+", match["names"]):
            gres = _GRES.search(match["rest"])
            found[match["names"]] = gres["value"] if gres else ""
    return found


def with_node_gres(text: str, node: str, gpus: Mapping[str, int]) -> str:
    """The file's text with other GPUs of one node. Raises ConfigError where the node has no line of its own."""
    lines = text.splitlines(keepends=True)
    own = [number for number, line in enumerate(lines) if (match := _LINE.match(line)) and match["names"] == node]
    if len(own) != 1 or _continues(lines, own[0]):
        raise ConfigError(f"{node} has {len(own)} NodeName lines in the include file, expected one", HOW)
    line = lines[own[0]]
    gres = _GRES.search(line)
    if gres is None:
        raise ConfigError(f"the NodeName line of {node} in the include file has no Gres", "add Gres= to it")
    new = with_gpus(gres["value"], gpus)
    lines[own[0]] = line[: gres.start("value")] + new + line[gres.end("value") :]
    return "".join(lines)


def _continues(lines: list[str], number: int) -> bool:
    """Whether the line is a part of a longer one: a backslash ends the line before it, or it."""
    return any(lines[each].rstrip("\r\n").endswith("\\") for each in (number - 1, number) if each >= 0)
