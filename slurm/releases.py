"""Differences between Slurm releases, and readers of values that releases write in several forms.

For a new release add a row to RELEASES and its recorded outputs to tests/slurm/fixtures. Forms that every reader takes
alike (plain numbers of 22.05, {set, infinite, number} later) need no row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from almanac.units import valid_unicode

_NUMBER = re.compile(r"(?<![0-9.])([0-9]{2})\.([0-9]{1,2})(?![0-9])")


@dataclass(frozen=True)
class Release:
    """A release of Slurm and what it has.

    recorded: its folder of recorded outputs, "" for none. changes_gpu_type: an update of a pending job's GPU type
    replaces it; 22.05 gives the job both types. has_suspend_counts: SuspendExcNodes=n[1-4]:2 keeps two powered nodes,
    busy ones included, and can be changed at run time. reconfigures_gres: `scontrol reconfigure` takes a node's new
    Gres; before, slurmctld must restart. shows_submit_line: `squeue --json` does, so that pending jobs have a script
    key. pyslurm: the least version that works with it, "" for none.
    """

    number: tuple[int, int]
    recorded: str = ""
    changes_gpu_type: bool = False
    has_suspend_counts: bool = False
    reconfigures_gres: bool = False
    shows_submit_line: bool = False
    pyslurm: str = ""

    def __str__(self) -> str:
        return "{}.{:02d}".format(*self.number)


_22_05 = Release((22, 5), "22.05.8")
_24_05 = replace(_22_05, number=(24, 5), recorded="", has_suspend_counts=True)
_24_11 = replace(_24_05, number=(24, 11), recorded="24.11.5", changes_gpu_type=True, reconfigures_gres=True)
_25_11 = replace(_24_11, number=(25, 11), recorded="25.11.7", shows_submit_line=True, pyslurm="25.11.2")
_26_05 = replace(_25_11, number=(26, 5), recorded="26.05.5", pyslurm="")
RELEASES = (_22_05, _24_05, _24_11, _25_11, _26_05)
"""Releases by number. A release without a row has the settings of the one before it."""


def release_of(text: str) -> Release | None:
    """The release of "24.11.5", "slurm-wlm 22.05.8", or "26.5.0" (as packages write 26.05); None if none is named."""
    found = _NUMBER.search(text)
    if found is None:
        return None
    number = (int(found[1]), int(found[2]))
    return replace(max((each for each in RELEASES if each.number <= number), default=_22_05, key=_order), number=number)


def _order(release: Release) -> tuple[int, int]:
    return release.number


def first_with(field: str) -> Release:
    """The first release that has something, by its field's name."""
    return next(each for each in RELEASES if getattr(each, field))


def number(value: Any) -> int | None:
    """A whole number in either form: 5, or {"set": true, "infinite": false, "number": 5}; None if unset.

    None too if it is greater than any of Slurm's, and so than a table can hold.
    """
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if type(value) is int and abs(value) < 2**53 else None


def words(value: Any) -> tuple[str, ...] | None:
    """Flags in either form: "IDLE", or ["IDLE", "DRAIN"]; () for none, None if they are not text."""
    if value is None or value == "":
        return ()
    listed = value if isinstance(value, list) else [value]
    return tuple(map(valid_unicode, listed)) if all(isinstance(word, str) for word in listed) else None


def exit_of(value: Any) -> tuple[int, int] | None:
    """Exit code and signal of either form: a wait status (22.05), or return_code and signal.id; None if not told."""
    if isinstance(value, Mapping):
        signal = value.get("signal")
        code, sent = number(value.get("return_code")), number(signal.get("id") if isinstance(signal, Mapping) else None)
        return None if code is None and sent is None else (code or 0, sent or 0)
    status = number(value)
    return None if status is None or status < 0 else (status >> 8 & 0xFF, status & 0x7F)


def records(data: bytes, key: str) -> list[Mapping[str, Any]] | None:
    """The objects listed under `key` of a JSON object; None if it lists none.

    Slurm passes bytes that are not UTF-8 through, in JSON too: each is read as U+FFFD.
    """
    try:
        content = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    found = content.get(key) if isinstance(content, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else None
