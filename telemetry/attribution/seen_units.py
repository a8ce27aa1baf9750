"""The GPUs and MIG instances that telemetry shows on each host, at the time of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from almanac.units import DAY_S
from telemetry.attribution.bindings import Unit
from telemetry.attribution.instances import InstanceSpan, SpansByGpu, held, present

DAY_MS = DAY_S * 1000


@dataclass(frozen=True)
class Inventory:
    """The GPUs seen in telemetry: units of each (host, day since 1970).

    named: the UUIDs, as the exporter gives them, of each unit on hosts whose bindings have UUIDs.
    spans: when GPUs with MIG instances showed them; a GPU without spans had its units all day.
    """

    units: Mapping[tuple[str, int], frozenset[Unit]]
    named: Mapping[tuple[str, int], frozenset[tuple[str, Unit]]] = field(default_factory=dict)
    spans: SpansByGpu = field(default_factory=dict)
    _known: dict[tuple[str, int, int], frozenset[Unit]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, host: str, start_s: int, end_s: int) -> frozenset[Unit]:
        """Units of a host in [start_s, end_s). A GPU split into MIG instances then counts as its instances only."""
        days = days_of(start_s, end_s)
        is_changing = any((host, day) in self.spans for day in days)
        key = (host, start_s, end_s) if is_changing else (host, days.start, days.stop)
        if key not in self._known:
            self._known[key] = self._at(host, days, start_s * 1000, end_s * 1000)
        return self._known[key]

    def _at(self, host: str, days: range, start_ms: int, end_ms: int) -> frozenset[Unit]:
        seen = frozenset().union(*(self.units.get((host, day), frozenset()) for day in days))
        found = set[Unit]()
        for index in {gpu for gpu, mig in seen if mig}:
            if any(index in self.spans.get((host, day), {}) for day in days):
                own = self._spans_of(host, index, days)
                found |= {(index, mig) for mig in present(own, start_ms, end_ms)}
            else:
                found |= {(gpu, mig) for gpu, mig in seen if gpu == index and mig}
        split = {gpu for gpu, _ in found}
        return frozenset(found | {unit for unit in seen if unit[0] not in split})

    def _spans_of(self, host: str, gpu: int, days: range) -> list[InstanceSpan]:
        """Those of these days; a day on which it was whole throughout is one span."""
        found: list[InstanceSpan] = []
        for day in days:
            own = self.spans.get((host, day), {}).get(gpu)
            if own is not None:
                found += own
            elif (gpu, "") in self.units.get((host, day), ()):
                found.append(InstanceSpan("", day * DAY_MS, (day + 1) * DAY_MS - 1))
        return found

    def instance(self, host: str, gpu: int, mig: str, start_ms: int, end_ms: int) -> InstanceSpan | None:
        """What the instance of this id was in [start_ms, end_ms); None where telemetry does not show it then."""
        days = range(start_ms // DAY_MS, max(end_ms - 1, start_ms) // DAY_MS + 1)
        return held(self._spans_of(host, gpu, days), mig, start_ms, end_ms)

    def names(self, host: str, start_s: int, end_s: int) -> frozenset[tuple[str, Unit]]:
        """UUIDs and their units on a host in [start_s, end_s)."""
        return frozenset().union(*(self.named.get((host, day), frozenset()) for day in days_of(start_s, end_s)))


def days_of(start_s: int, end_s: int) -> range:
    """Days since 1970 (UTC) that the half-open [start_s, end_s) touches; that of its start, where it is empty."""
    return range(start_s // DAY_S, (max(end_s, start_s + 1) - 1) // DAY_S + 1)
