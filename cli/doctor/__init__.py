"""`almanac doctor`: each module checks one subject, and `run_probes` joins their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from almanac.errors import AlmanacError
from almanac.units import format_count, printable
from cli.app import App

__all__ = ("hooks", "main")
CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. todo: the fix, empty if ok. details: the same data for programs.

    is_blocking: the site is not ready until this is fixed, even if it is only a warning.
    """

    name: str
    status: CheckStatus
    said: str
    todo: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    is_blocking: bool = False


Probe = Callable[[App], Iterator[Check]]


def run_probes(app: App, probes: Mapping[str, Probe]) -> list[Check]:
    """Run the probes in order and return their findings; a probe that raises AlmanacError adds a failed check.

    Without a usable configuration, no further probe runs. Checks that fail for the same reason are one finding, which
    names the others.
    """
    found: list[Check] = []
    causes: dict[str, int] = {}  # places in `found`, by what to do
    for name, probe in probes.items():
        try:
            found += probe(app)
        except AlmanacError as error:
            causes.setdefault(error.hint, len(found))
            found.append(Check(name, "fail", str(error), error.hint))
            if name == "configuration":
                break
    others: dict[int, list[str]] = {place: [] for place in causes.values()}
    shown = []
    for place, check in enumerate(found):
        cause = causes.get(check.todo, place) if check.status != "ok" else place
        if cause == place:
            shown.append(place)
        else:
            others[cause].append(check.name)
    return [_with_others(found[place], list(dict.fromkeys(others.get(place, ())))) for place in shown]


def _with_others(check: Check, names: Sequence[str]) -> Check:
    if not names:
        return check
    said = f"{check.said}; for the same reason not checked: {', '.join(names)}"
    return replace(check, said=said, details={**check.details, "not_checked": list(names)})


def found_or_ok(found: Iterable[Check], name: str, said: str) -> Iterator[Check]:
    """Yield the findings, or one check with status ok if there are none."""
    checks = list(found)
    yield from checks or [Check(name, "ok", said)]


def first_few(names: Sequence[str], shown: int = 5) -> str:
    """List the first names and count the rest: "a, b, c, d, e and 1,795 more" for 1,800 names."""
    more = f" and {format_count(len(names) - shown)} more" if len(names) > shown else ""
    return f"{', '.join(printable(name) for name in names[:shown])}{more}"
