"""Which MIG instances a GPU had at a time, and what they were, from the times at which telemetry shows them.

A GPU's layout can change between two jobs, and NVIDIA gives the same instance ids again: before and after a change one
id can be two instances of different size. So what a job ran on follows from its own time, not from the day.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from almanac.mig import is_same_profile

SAME_SIZE = 0.02
"""Capacities that differ by at most this share are those of one instance: rounding, or a reading within a change."""
LONGEST_PAUSE = 2.5
"""A pause of more scrape intervals than this ends a span: the instance can have been made again in it."""
_LEAST_SHARE = 0.1
"""What a GPU shows for less of a job's time is the layout before or after it: clocks and records differ a little."""
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
        """Whether both can be one instance. What is not known of one does not tell them apart."""
        if self.profile and other.profile and not is_same_profile(self.profile, other.profile):
            return False
        if self.total_mib is None or other.total_mib is None:
            return True
        return abs(self.total_mib - other.total_mib) <= SAME_SIZE * max(self.total_mib, other.total_mib)

    def touches(self, start_ms: int, end_ms: int) -> bool:
        """Whether a sample lies in [start_ms, end_ms), or samples lie on both sides of it."""
        return self.first_ms < end_ms and self.last_ms >= start_ms

    def overlap_ms(self, start_ms: int, end_ms: int) -> int:
        """How long it is in [start_ms, end_ms); a lone sample counts 1 ms."""
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
    """The ids of the instances that one GPU had in [start_ms, end_ms); "" alone where it was whole.

    A GPU that was not scraped then counts as it was just before and just after. Counters of the whole GPU beside those
    of its instances do not count.
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
