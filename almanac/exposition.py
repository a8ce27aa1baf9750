"""Pages in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from almanac.units import valid_unicode

Labels = tuple[tuple[str, str], ...]


def family(name: str, kind: str, about: str, samples: Sequence[tuple[Labels, float]]) -> Metric:
    """Return a metric family. kind: "counter" (the name ends in _total) or "gauge". samples: value for each label set.

    An unknown value is no sample: never 0.
    """
    made = Metric(name.removesuffix("_total"), about, kind)
    for labels, value in samples:
        made.add_sample(name, {label: valid_unicode(text) for label, text in labels}, value)
    return made


def exposition(families: Iterable[Metric]) -> str:
    """Return the text of the families that have samples, in the order given. Label values may hold anything."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = [family for family in families if family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families
