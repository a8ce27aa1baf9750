"""GPU counts and types from every way that Slurm writes them.

Requests: "gpu:2", "gpu:a100:2", "gres:gpu:2" (up to 23.02), "gres/gpu:2", "gres/gpu:a100=2" (from 23.11), "gpu".
Allocations: AllocTRES "billing=4,gres/gpu:a100=4,gres/gpu=4"; gres_detail "gpu:a100:2(IDX:0-1,3)".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

SHARED_GRES = ("shard", "mps")
"""GRES that give a job a part of a GPU. Slurm gives out a GPU as one of gpu, shard, and mps."""
_DETAIL = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:[0-9]+\(IDX:(?P<index>[^()]*)\)")
_INDEX = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")

_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?)")
_UNIT_MIB = {"": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
_MOST_MIB = 2.0**34
"""16 PiB. Slurm writes what it does not know as 16E."""


@cache
def _term(name: str) -> re.Pattern[str]:
    """A type can begin with a digit ("2080ti", "1g.5gb") or be a number ("gpu:3090:2"); alone, it is the count."""
    kind = r"(?:[:/](?P<type>(?![0-9]+\Z)[\w.+-]+))?"
    return re.compile(rf"(?:gres[:/])?{name}{kind}(?:[:=](?P<count>[0-9]{{1,9}}))?")


@dataclass(frozen=True)
class Gpus:
    """A number of GPUs, or of another GRES, of one type where one was named."""

    count: int = 0
    type: str = ""


def parse_gpus(text: str, name: str = "gpu") -> Gpus:
    """The GPUs of a comma-separated TRES or GRES text; Gpus(0) where it names none. name: of the GRES.

    An untyped total ("gres/gpu=4") wins over the typed parts it is the sum of; without one, the parts add up.
    """
    if name not in text:
        return Gpus()
    total: int | None = None
    typed: dict[str, int] = {}
    for term in re.sub(r"\([^()]*\)", "", text).split(","):
        match = _term(name).fullmatch(term.strip())
        if not match:
            continue
        count = int(match["count"] or 1)
        if match["type"]:
            typed[match["type"]] = typed.get(match["type"], 0) + count
        else:
            total = count if total is None else max(total, count)
    if total is None:
        total = sum(typed.values())
    return Gpus(total, next(iter(typed)) if len(typed) == 1 else "")


def most(found: Iterable[Gpus]) -> Gpus:
    """The largest number of several texts about the same GPUs, with the type, where they name one and no other."""
    known = [each for each in found if each.count]
    types = {each.type for each in known if each.type}
    return Gpus(max((each.count for each in known), default=0), types.pop() if len(types) == 1 else "")


def parse_shares(text: str) -> int | None:
    """The shards, or else the percentages of MPS, that a TRES or GRES text names; None where it names none."""
    return next((shares.count for name in SHARED_GRES if (shares := parse_gpus(text, name)).count), None)


def parse_tres(text: str) -> dict[str, str]:
    """ "cpu=32,mem=32000M,gres/gpu=4" as a mapping; terms without "=" are passed over."""
    return dict(term.split("=", 1) for term in text.split(",") if "=" in term)


def parse_gpu_indices(detail: str) -> tuple[int, ...]:
    """GPU indices of one node's gres_detail: "gpu:a100:3(IDX:0-1,3)" gives (0, 1, 3); () where there are none.

    Raises ValueError where an index list is malformed.
    """
    indices: set[int] = set()
    for match in _DETAIL.finditer(detail):
        indices.update(parse_index_list(match["index"]))
    return tuple(sorted(indices))


def parse_index_list(text: str) -> tuple[int, ...]:
    """ "0-1,3" as (0, 1, 3); "" and "N/A" as (). Raises ValueError for anything else."""
    if text in ("", "N/A"):
        return ()
    indices: set[int] = set()
    for part in text.split(","):
        match = _INDEX.fullmatch(part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"not a list of GPU indices: {text[:80]!r}")
        indices.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(indices))


def size_mib(text: str) -> float | None:
    """MiB of "214728K" or, without a unit, of bytes; None for any other text, and above 16 PiB."""
    match = _SIZE.fullmatch(text) if text.isascii() else None
    mib = float(match["number"]) * _UNIT_MIB[match["unit"]] if match else _MOST_MIB
    return mib if mib < _MOST_MIB else None
