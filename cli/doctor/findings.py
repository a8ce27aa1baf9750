"""A finding of `almanac doctor`, and the run of the checks that make findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from almanac.errors import AlmanacError
from cli.app import App

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


def run_probes(app: App, probes: Mapping[str, Probe]) -> Iterator[Check]:
    """The findings of each probe, in their order; one that cannot run fails, and without a configuration none can."""
    for name, probe in probes.items():
        try:
            yield from probe(app)
        except AlmanacError as error:
            yield Check(name, "fail", str(error), error.hint)
            if name == "configuration":
                return
