"""The GPUs and MIG instances that telemetry shows on each host at a time, and those that a record of a job names.

A GPU's layout can change between two jobs, and NVIDIA gives the same instance ids again: before and after a change one
id can be two instances of different size. So what a job ran on follows from its own time, not from the day.

Records are those of a prolog and of squeue. Slurm's index names a GPU only on a node without MIG: with MIG it counts
MIG instances and GPUs alike. There a record needs the UUID that Slurm gives to a MIG instance. A UUID names one GPU at
any index, so it wins over an index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from almanac.hardware import is_same_profile
from almanac.units import DAY_S

UNBOUND_MIG = "shared node with MIG, GPU binding without a known UUID"
CONTRADICTED = "shared node, GPU index and UUID of the binding differ"

Unit = tuple[int, str]
"""GPU index on its host, and MIG instance id ("" for the whole GPU)."""


@dataclass(frozen=True)
class Binding:
    """One GPU of a job as a prolog record or squeue named it, at seen_s.

    gpu: Slurm's index. uuid: of the GPU, or of a MIG instance whose GPU is not known. mig: instance of that GPU.
    """

    job_id: int
    host: str
    gpu: int
    origin: str
    seen_s: int
    uuid: str | None = None
    mig: str | None = None


def units_of(record: Binding, seen: frozenset[Unit], names: frozenset[tuple[str, Unit]]) -> frozenset[Unit] | str:
    """The units that a record names on its host, or why it is not believed.

    seen: units of the host in telemetry. names: the UUIDs that telemetry gives them, if any.
    """
    named = frozenset(unit for uuid, unit in names if uuid == record.uuid)
    if record.mig is not None or (record.uuid or "").startswith("MIG-"):
        return frozenset(unit for unit in named if record.mig in (None, unit[1])) or UNBOUND_MIG
    if any(mig for _, mig in seen):
        return frozenset(unit for unit in named & seen if not unit[1]) or UNBOUND_MIG
    # The GPU was whole then; telemetry can show its UUID on instances at another time of the day.
    own, named = (record.gpu, ""), frozenset(unit for unit in named if not unit[1])
    has_other_uuid = record.uuid is not None and any(unit == own for _, unit in names)
    if own in named or not (named or has_other_uuid):
        return frozenset({own})
    # The UUID wins if telemetry shows it at one other index. At no index, or at several, it identifies no GPU.
    return named if len(named) == 1 else CONTRADICTED


SAME_SIZE = 0.02
"""Capacities that differ by at most this share are those of one instance: rounding, or a reading within a change."""
LONGEST_PAUSE = 2.5
"""A pause of more scrape intervals than this ends a span: the instance can have been made again in it."""
_LEAST_SHARE = 0.1
"""A layout seen for less of a job's time is the one before or after it: clocks and records differ a little."""
_SAME_SCRAPE_MS = 5_000


@dataclass(frozen=True, slots=True)
class InstanceSpan:
    """A time [first_ms, last_ms], first and last sample, in which a GPU or MIG instance did not change.

    mig: its id; "" for the whole GPU. gap_ms: median time between samples, 0 for a lone one.
    total_mib: median of used + free; None without such samples.
    """

    mig: str
    first_ms: int
    last_ms: int
    gap_ms: float = 0.0
    samples: int = 1
    profile: str | None = None
    total_mib: float | None = None

    def is_same(self, other: InstanceSpan) -> bool:
        """Return True if both can be one instance. An unknown property of one does not tell them apart."""
        if self.profile and other.profile and not is_same_profile(self.profile, other.profile):
            return False
        if self.total_mib is None or other.total_mib is None:
            return True
        return abs(self.total_mib - other.total_mib) <= SAME_SIZE * max(self.total_mib, other.total_mib)

    def touches(self, start_ms: int, end_ms: int) -> bool:
        """Return True if a sample lies in [start_ms, end_ms), or samples lie on both sides of it."""
        return self.first_ms < end_ms and self.last_ms >= start_ms

    def overlap_ms(self, start_ms: int, end_ms: int) -> int:
        """Return the time in [start_ms, end_ms); a lone sample counts 1 ms."""
        return min(self.last_ms + 1, end_ms) - max(self.first_ms, start_ms)


def joined(spans: Iterable[InstanceSpan]) -> list[InstanceSpan]:
    """The spans of one GPU, those of one instance without a pause between them made one, by instance and time."""
    found: list[InstanceSpan] = []
    for span in sorted(spans, key=lambda each: (each.mig, each.first_ms)):
        if found and _continues(found[-1], span):
            found[-1] = _together(found[-1], span)
        else:
            found.append(span)
    return found


def _continues(before: InstanceSpan, after: InstanceSpan) -> bool:
    pause_ms = after.first_ms - before.last_ms
    is_soon = pause_ms <= LONGEST_PAUSE * max(before.gap_ms, after.gap_ms)
    return before.mig == after.mig and is_soon and before.is_same(after)


def _together(before: InstanceSpan, after: InstanceSpan) -> InstanceSpan:
    main, other = (after, before) if after.samples > before.samples else (before, after)
    return replace(
        before,
        last_ms=max(before.last_ms, after.last_ms),
        gap_ms=main.gap_ms or other.gap_ms,
        samples=before.samples + after.samples,
        profile=main.profile or other.profile,
        total_mib=other.total_mib if main.total_mib is None else main.total_mib,
    )


def present(spans: Sequence[InstanceSpan], start_ms: int, end_ms: int) -> frozenset[str]:
    """The ids of the instances that one GPU had in [start_ms, end_ms); "" alone if it was whole.

    A GPU that was not scraped then counts as it was just before and just after. If it has instances, counters of the
    whole GPU do not count.
    """
    shown_ms: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.touches(start_ms, end_ms):
            shown_ms[span.mig] += span.overlap_ms(start_ms, end_ms)
    found = {mig for mig, time_ms in shown_ms.items() if time_ms >= _LEAST_SHARE * max(shown_ms.values())}
    if not found:
        before_ms = max((span.last_ms for span in spans if span.last_ms < start_ms), default=None)
        after_ms = min((span.first_ms for span in spans if span.first_ms >= end_ms), default=None)
        for at_ms in (before_ms, after_ms):
            if at_ms is not None:
                near = (at_ms - _SAME_SCRAPE_MS, at_ms + _SAME_SCRAPE_MS)
                found |= {span.mig for span in spans if span.touches(*near)}
    return frozenset(found - {""} or found)


def held(spans: Iterable[InstanceSpan], mig: str, start_ms: int, end_ms: int) -> InstanceSpan | None:
    """The instance of this id in [start_ms, end_ms); the one seen for the longest time if there were several.

    None where telemetry does not show it in this time.
    """
    mine = [span for span in spans if span.mig == mig and span.touches(start_ms, end_ms)]
    groups: list[list[InstanceSpan]] = []
    for span in mine:
        group = next((each for each in groups if each[0].is_same(span)), None)
        if group is None:
            groups.append([span])
        else:
            group.append(span)
    if not groups:
        return None
    longest = max(groups, key=lambda each: sum(span.overlap_ms(start_ms, end_ms) for span in each))
    whole = longest[0]
    for span in longest[1:]:
        whole = _together(whole, span)
    return whole


SpansByGpu = Mapping[tuple[str, int], Mapping[int, Sequence[InstanceSpan]]]
"""Spans by (host, day since 1970) and GPU index, of the GPUs that had MIG instances on that day."""


def by_gpu(rows: Iterable[tuple[str, int, int, InstanceSpan]]) -> SpansByGpu:
    """Spans from rows of host, day, GPU index, and span. GPUs without any instance on the day are left out."""
    found: dict[tuple[str, int], dict[int, list[InstanceSpan]]] = defaultdict(lambda: defaultdict(list))
    for host, day, gpu, span in rows:
        found[host, day][gpu].append(span)
    split = {
        key: {gpu: joined(spans) for gpu, spans in gpus.items() if any(span.mig for span in spans)}
        for key, gpus in found.items()
    }
    return {key: gpus for key, gpus in split.items() if gpus}


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
        """Return the instance of this id in [start_ms, end_ms); None if telemetry does not show it then."""
        days = range(start_ms // DAY_MS, max(end_ms - 1, start_ms) // DAY_MS + 1)
        return held(self._spans_of(host, gpu, days), mig, start_ms, end_ms)

    def names(self, host: str, start_s: int, end_s: int) -> frozenset[tuple[str, Unit]]:
        """UUIDs and their units on a host in [start_s, end_s)."""
        return frozenset().union(*(self.named.get((host, day), frozenset()) for day in days_of(start_s, end_s)))


def days_of(start_s: int, end_s: int) -> range:
    """Days since 1970 (UTC) that the half-open [start_s, end_s) touches; the day of its start if the span is empty."""
    return range(start_s // DAY_S, (max(end_s, start_s + 1) - 1) // DAY_S + 1)
