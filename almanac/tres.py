"""TRES and GRES texts of jobs and nodes: GPU counts and types from every way that Slurm writes them.

Requests: "gpu:2", "gpu:a100:2", "gres:gpu:2" (up to 23.02), "gres/gpu:2", "gres/gpu:a100=2" (from 23.11), "gpu".
Allocations: AllocTRES "billing=4,gres/gpu:a100=4,gres/gpu=4"; gres_detail "gpu:a100:2(IDX:0-1,3)".
Nodes: "gpu:1g.10gb:7(S:0-1),gpu:a100:3"; in use, "gpu:a100:3(IDX:0-1,3),shard:a100:2(0/4,0/4,2/4,0/4)".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

SHARED_GRES = ("shard", "mps")
"""GRES that give a job a part of a GPU. Slurm gives out a GPU as one of gpu, shard, and mps."""
_DETAIL = re.compile(rf"(?:^|,)(?:{'|'.join(('gpu', *SHARED_GRES))})(?::[^:(,]+)?:[0-9]+\(IDX:(?P<index>[^()]*)\)")
_SHARED_DETAIL = re.compile(rf"(?:^|,)(?:{'|'.join(SHARED_GRES)})(?::[^:(,]+)?:[0-9]+\((?P<parts>[0-9/,]*)\)")
_INDEX = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")

_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?)")
_PERCENT = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,6})?")
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
    """Return the GPUs of a comma-separated TRES or GRES text; Gpus(0) if it names none. name: of the GRES.

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
    """The shards, or else the percentages of MPS, that a TRES or GRES text names; None if it names none."""
    return next((shares.count for name in SHARED_GRES if (shares := parse_gpus(text, name)).count), None)


def parse_tres(text: str) -> dict[str, str]:
    """ "cpu=32,mem=32000M,gres/gpu=4" as a mapping; terms without "=" are skipped."""
    return dict(term.split("=", 1) for term in text.split(",") if "=" in term)


def parse_gpu_indices(detail: str) -> tuple[int, ...]:
    """GPU indices of one node's gres_detail: "gpu:a100:3(IDX:0-1,3)" gives (0, 1, 3); () where there are none.

    "shard:2(0/4,2/4)", on 22.05 "shard:2(IDX:1)", gives (1,): the GPUs with parts of the job. Raises
    ValueError where an index list is malformed.
    """
    parts = [_SHARED.findall(match["parts"]) for match in _SHARED_DETAIL.finditer(detail)]
    indices = {gpu for part in parts for gpu, used in enumerate(part) if used.strip("0")}
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


def gpu_memory_mib(usage: str) -> float | None:
    """GPU memory in a TRESUsageIn text, MiB: "gres/gpumem=38888M", by type "gres/gpumem:a100=4G"; None if unknown."""
    return _usage(usage, "gpumem", size_mib)


def gpu_use_pct(usage: str) -> float | None:
    """GPU utilization in a TRESUsageIn text, %, of all GPUs together: 2 busy ones have 200; None if unknown."""
    return _usage(usage, "gpuutil", lambda text: float(text) if _PERCENT.fullmatch(text) else None)


def _usage(usage: str, name: str, read: Callable[[str], float | None]) -> float | None:
    """The total that has no type, or else the sum of the types. None if any of these cannot be read."""
    terms = [term.split("=", 1) for term in usage.split(",") if term.startswith(f"gres/{name}")]
    parts = [(term[0], read(term[-1])) for term in terms if term[0].partition(":")[0] == f"gres/{name}"]
    chosen = [value for label, value in parts if ":" not in label] or [value for _, value in parts]
    known = [value for value in chosen if value is not None]
    return sum(known) if known and len(known) == len(chosen) else None


_TERM = re.compile(
    r"(?P<name>\w+)(?::(?P<type>\(null\)|(?![0-9]+(?:\(|\Z))[\w.+-]{1,64}))?(?::(?P<count>[0-9]{1,9}))?"
    r"(?P<detail>(?:\([^()]*\))*)",
    re.ASCII,
)
_SHARED = re.compile(r"([0-9]{1,9})/[0-9]{1,9}")
"""Parts in use of one GPU, and all of its parts."""


def gpu_types(gres: str) -> Counter[str]:
    """GPUs by type in a node's Gres text; "" is no type. Other GRES, and terms of another form, are left out."""
    found: Counter[str] = Counter()
    for name, match in _terms(gres):
        if name == "gpu" and match:
            found[_type(match)] += int(match["count"] or 1)
    return +found


def named_types(gres: str) -> frozenset[str]:
    """GPU types that a text names, those of 0 GPUs included, as in "gpu:a100:0(IDX:N/A)"."""
    return frozenset(kind for name, match in _terms(gres) if name == "gpu" and match and (kind := _type(match)))


def with_gpus(gres: str, types: Mapping[str, int]) -> str:
    """The Gres text with other GPUs; what is no GPU stays."""
    others = [term for term in split_gres(gres) if (match := _TERM.fullmatch(term)) is None or match["name"] != "gpu"]
    return ",".join([*(f"gpu:{name}:{number}" for name, number in sorted(types.items()) if number), *others])


def free_gpus(gres: str, used: str) -> dict[str, int]:
    """Free GPUs of a node by type, of what it has and what jobs use; {} if either text is missing or unreadable.

    Slurm gives out a GPU whole or in parts (shard, mps), and does not count one that is in parts as a used GPU. Parts
    without the GPU that they are on count as one GPU each.
    """
    total, busy = _counts(gres, "gpu"), _counts(used, "gpu")
    parts = [_counts(used, name) for name in SHARED_GRES]
    if not total or not busy or None in parts:
        return {}
    if total.keys() <= busy.keys():
        free = {name: count - busy[name] for name, count in total.items()}
    elif total.keys() == {""}:  # slurm.conf names no type, gres.conf does
        free = {"": total[""] - sum(busy.values())}
    else:
        return {}
    for name, count in ((name, count) for each in parts for name, count in (each or {}).items()):
        for kind in [name] if name in free else free:
            free[kind] -= count
    return {name: max(0, count) for name, count in free.items()}


def _counts(gres: str, wanted: str) -> dict[str, int] | None:
    """Instances of a GRES by type, of shared ones the GPUs that they are on; None if one of its terms is unreadable."""
    counts: dict[str, int] = {}
    for name, match in _terms(gres):
        if name == wanted:
            if match is None or match["count"] is None:
                return None
            on_gpus = _SHARED.findall(match["detail"])
            count = sum(used.strip("0") != "" for used in on_gpus) if on_gpus else int(match["count"])
            counts[_type(match)] = counts.get(_type(match), 0) + count
    return counts


def _terms(gres: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    return ((term.split(":")[0].split("(")[0], _TERM.fullmatch(term)) for term in split_gres(gres))


def _type(match: re.Match[str]) -> str:
    return "" if match["type"] in (None, "(null)") else match["type"]


def split_gres(gres: str) -> list[str]:
    """The terms of a Gres text; commas within parentheses do not split."""
    if gres in ("", "(null)"):
        return []
    return [term.strip() for term in re.findall(r"(?:[^,(]|\([^()]*\))+", gres)]  # linear: no nested parentheses
