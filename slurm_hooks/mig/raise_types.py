"""Which GRES types are larger than which, and how a job that asks for one of a type would ask for another. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from almanac.mig import profile_name
from telemetry.slurm.gres_queue import TYPE, RequestKey

_SIZES = re.compile(r"([1-7])g\.([0-9]{1,3})gb")
_TERM = re.compile(rf"(?P<before>gres[/:]gpu[/:])(?P<type>{TYPE})(?P<after>(?:[:=]1)?)", re.ASCII)
_CPU_TERM = re.compile(r"cpu[:=][0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class OneSlice:
    """A request of one GPU or slice of one type. key: scontrol's. text: as Slurm shows it."""

    key: RequestKey
    text: str
    type: str

    def of(self, new: str) -> str:
        """The text that asks for one of another type; other terms, such as "cpu=4", stay."""
        return ",".join(
            f"{match['before']}{new}{match['after']}" if (match := _TERM.fullmatch(term)) else term
            for term in self.text.split(",")
        )


def one_slice(requests: Mapping[RequestKey, str]) -> OneSlice | None:
    """The only GPU request of a job, if it is for exactly one GPU or slice of one type; None otherwise.

    None too for --gpus-per-socket, which no update changes, and next to any other GRES.
    """
    found = None
    for key, text in requests.items():
        terms = text.split(",")
        gpus = [match["type"] for term in terms if (match := _TERM.fullmatch(term))]
        others = [term for term in terms if not _TERM.fullmatch(term)]
        if key == "TresPerSocket" or any(not _CPU_TERM.fullmatch(term) for term in others) or len(gpus) > 1:
            return None
        if gpus and found:
            return None
        if gpus:
            found = OneSlice(key, text, gpus[0])
    return found


def chains(types: Collection[str], configured: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Types from the smallest up; in each chain a larger one can run every job of a smaller one.

    configured: the site's own order, the only chain where there is one. Otherwise MIG profiles whose types begin alike
    ("a100_1g.5gb", "a100_2g.10gb"), by memory and compute slices as their names tell; a type with more memory but fewer
    slices than a smaller one is left out, and so are whole GPUs and profiles with an attribute (+me).
    """
    if configured:
        return (tuple(dict.fromkeys(configured)),)
    families: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name in sorted(types):
        profile = profile_name(name) or ""
        sizes = _SIZES.fullmatch(profile)
        if sizes and name.lower().endswith(profile):
            families[name[: -len(profile)]].append((int(sizes[2]), int(sizes[1]), name))
    return tuple(_rising(sorted(found)) for _, found in sorted(families.items()))


def _rising(found: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    chain: list[str] = []
    most = 0
    for _, compute, name in found:
        if compute >= most:
            chain.append(name)
            most = compute
    return tuple(chain)
