"""Samples out of the JSON of Prometheus' range selectors, without a Python object per sample.

A matrix is `{"metric":{labels},"values":[[s,"v"],[s,"v"]]}` per series. A quote within a JSON string is always
escaped, so `{"metric":{`, `},"values":[[` and `]]}` can only be structure; what lies between the last two is
numbers, read as CSV by pyarrow. Any other spelling of the same JSON is read by the json module.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from almanac.units import printable, valid_unicode

_START, _MIDDLE, _END = b'{"metric":{', b'},"values":[[', b"]]}"
_BETWEEN = b"],["
_NAME = b'"__name__":"'
_MOST_LABELS = 50_000
_NOT_FINITE = ["NaN", "+Inf", "-Inf", "Inf"]
_LAST_S = 253_402_300_799  # 9999-12-31


@dataclass(frozen=True)
class SeriesSamples:
    """Samples of several series: labels[i] and lengths[i] of each, then all times (ms) and values one after another.

    A value that is NaN or infinite is NaN.
    """

    labels: list[dict[str, str]]
    lengths: npt.NDArray[np.int64]
    time_ms: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.time_ms)


@dataclass(frozen=True)
class Point:
    """One series of a vector: its labels, and its value, which may be NaN or infinite."""

    labels: dict[str, str]
    value: float


def parse_answer(body: bytes) -> dict[str, Any]:
    """The answer of a query as the json module has it, but for its result: Samples of a matrix, Points of a vector.

    Raises ValueError if it is no JSON object, or its result is not as Prometheus documents it.
    """
    try:
        return {"status": "success", "data": {"resultType": "vector", "result": _points(body)}}
    except (ValueError, msgspec.MsgspecError):
        pass  # no vector, or one that is spelled otherwise
    try:
        head, series, tail = _cut(body)
        answer = json.loads(head + tail if series else body)
        data = answer.get("data")
        if series:
            data["result"] = _read(body, series)
        elif isinstance(data, dict) and ("resultType" in data or "result" in data):
            data["result"] = _READERS[data["resultType"]](_list(data["result"]))
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, pa.ArrowException) as error:
        raise ValueError(f"not an answer of Prometheus: {type(error).__name__}: {error}"[:200]) from error
    return dict(answer)


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct, forbid_unknown_fields=True, tag_field="resultType", tag="vector"):
    result: list[_Series]


class _VectorAnswer(msgspec.Struct, forbid_unknown_fields=True):
    status: Literal["success"]
    data: _Vector


def _points(body: bytes) -> list[Point]:
    """Read a vector in a third of the time and memory of `_vector`. Raises ValueError, MsgspecError for another one."""
    found = msgspec.json.decode(body, type=_VectorAnswer).data.result
    return [Point(series.metric, float(series.value[1])) for series in found]


def _cut(body: bytes) -> tuple[bytes, list[tuple[int, int, int]], bytes]:
    """Return what precedes the series, (start, middle, end) of each, what follows; no series if spelled otherwise."""
    series = []
    first = at = body.find(_START, 0, 4096)
    while at >= 0 and body.endswith(b'"result":[', 0, first):
        middle = body.find(_MIDDLE, at)
        end = body.find(_END, middle)
        if middle < 0 or end < 0 or not body.startswith(_START, at):
            return b"", [], b""
        series.append((at, middle, end))
        at = end + len(_END)
        if body[at : at + 1] != b",":
            return body[:first], series, body[at:]
        at += 1
    return b"", [], b""


def _read(body: bytes, series: list[tuple[int, int, int]]) -> SeriesSamples:
    view = memoryview(body)
    labels = [_labels_of(body[start + len(_START) - 1 : middle + 1]) for start, middle, _ in series]
    between = len(_MIDDLE)
    pieces = [view[middle + between : end] for _, middle, end in series]
    lengths = [body.count(_BETWEEN, middle + between, end) + 1 for _, middle, end in series]
    table = pa.csv.read_csv(
        io.BytesIO(b"\n".join(pieces).replace(_BETWEEN, b"\n").translate(None, b'"')),
        read_options=pa.csv.ReadOptions(column_names=["time", "value"]),
        parse_options=pa.csv.ParseOptions(quote_char=False),
        convert_options=pa.csv.ConvertOptions(
            column_types={"time": pa.float64(), "value": pa.float64()}, null_values=_NOT_FINITE
        ),
    )
    if len(table) != sum(lengths):
        raise ValueError("not a list of times and values")
    value = table["value"].to_numpy()
    finite = np.where(np.isfinite(value), value, np.nan)
    return SeriesSamples(labels, np.array(lengths, dtype=np.int64), _times(table["time"].to_numpy()), finite)


def _labels_of(text: bytes) -> dict[str, str]:
    before, _, after = text.partition(_NAME)
    name, _, behind = after.partition(b'"')
    if before.endswith(b"\\") or b"\\" in name or not behind.startswith(b","):
        return _labels(json.loads(text))
    return {"__name__": name.decode(), **_other_labels(before + behind[1:])}


@functools.lru_cache(maxsize=_MOST_LABELS)
def _other_labels(text: bytes) -> dict[str, str]:
    """Labels that all counters of a GPU share, and that repeat in every span."""
    return _labels(json.loads(text))


def _matrix(result: list[dict[str, Any]]) -> SeriesSamples:
    values = [pair for series in result for pair in series["values"]]
    number = np.array([_number(value) for _, value in values], dtype=np.float64)
    number[~np.isfinite(number)] = np.nan
    return SeriesSamples(
        [_labels(series["metric"]) for series in result],
        np.array([len(series["values"]) for series in result], dtype=np.int64),
        _times(np.array([float(time) for time, _ in values], dtype=np.float64)),
        number,
    )


def _vector(result: list[dict[str, Any]]) -> list[Point]:
    found = []
    for series in result:
        _, value = series["value"]
        found.append(Point(_labels(series["metric"]), _number(value)))
    return found


_READERS: dict[str, Callable[[Any], SeriesSamples | list[Point]]] = {"matrix": _matrix, "vector": _vector}


def _list(result: Any) -> list[dict[str, Any]]:
    if not isinstance(result, list):
        raise ValueError(f"a result that is no list: {printable(str(result), 80)}")
    return result


def _labels(labels: Any) -> dict[str, str]:
    """Labels as texts. Raises ValueError for anything else. Lone surrogates, which no file can hold, are replaced."""
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise ValueError(f"labels that are no strings: {printable(str(labels), 80)}")
    return {valid_unicode(name): valid_unicode(text) for name, text in labels.items()}


def _number(value: Any) -> float:
    """A sample's value, which JSON holds as text; a number is taken too. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"a value that is no number: {printable(str(value), 80)}")
    return float(value)


def _times(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Seconds since 1970 in ms. Raises ValueError where one is no date."""
    if not (np.abs(seconds) <= _LAST_S).all():
        raise ValueError("a time that is no date")
    return np.rint(seconds * 1000).astype(np.int64)
