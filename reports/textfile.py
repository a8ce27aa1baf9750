"""Prometheus' text exposition format (version 0.0.4), for node_exporter's textfile collector."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from almanac.units import valid_unicode

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """A family. kind: "counter" or "gauge". samples: the value for each set of labels; none: the family is left out.

    A value that is not known is no sample: never 0.
    """

    name: str
    kind: str
    about: str
    samples: Sequence[tuple[Labels, float]]


def exposition(metrics: Sequence[Metric]) -> str:
    """The families with samples, in the order given, each with its HELP and TYPE. Label values may hold anything."""
    return "".join(line + "\n" for metric in metrics if metric.samples for line in _lines(metric))


def _lines(metric: Metric) -> Iterator[str]:
    if not _NAME.fullmatch(metric.name):
        raise ValueError(f"not a name of a metric: {metric.name!r}")
    about = metric.about.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {metric.name} {about}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in metric.samples:
        yield f"{metric.name}{_labels(labels)} {_number(value)}"


def _labels(labels: Labels) -> str:
    if not all(_LABEL.fullmatch(name) for name, _ in labels):
        raise ValueError(f"not names of labels: {labels!r}")
    return f"{{{','.join(f'{name}={_quoted(value)}' for name, value in labels)}}}" if labels else ""


def _quoted(value: str) -> str:
    return '"' + valid_unicode(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
