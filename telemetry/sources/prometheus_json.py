"""Samples out of the JSON of Prometheus' range selectors, without a Python object per sample.

A matrix is `{"metric":{labels},"values":[[s,"v"],[s,"v"]]}` per series. A quote within a JSON string is always
escaped, so `{"metric":{`, `},"values":[[` and `]]}` can only be structure; what lies between the last two is
numbers, read as CSV by pyarrow. Any other spelling of the same JSON is read by the json module.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

_START, _MIDDLE, _END = b'{"metric":{', b'},"values":[[', b"]]}"
_NOT_FINITE = ["NaN", "+Inf", "-Inf", "Inf"]


@dataclass(frozen=True)
class Samples:
    """Samples of several series: labels[i] and lengths[i] of each, then all times (ms) and values one after another.

    A value that is NaN or infinite is NaN.
    """

    labels: list[dict[str, str]]
    lengths: npt.NDArray[np.int64]
    time_ms: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.time_ms)


def parse_answer(body: bytes) -> dict[str, Any]:
    """The answer of a query as the json module has it, but for a matrix's result, which becomes Samples.

    Raises ValueError where it is no JSON object.
    """
    head, series, tail = _cut(body)
    if series:
        answer = json.loads(head + tail)
        answer["data"]["result"] = _read(body, series)
        return dict(answer)
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError("not a JSON object")
    data = answer.get("data")
    if isinstance(data, dict) and data.get("resultType") == "matrix":
        data["result"] = _from_objects(data["result"])
    return answer


def _cut(body: bytes) -> tuple[bytes, list[tuple[int, int, int]], bytes]:
    """What precedes the series, (start, middle, end) of each, what follows; no series where spelled otherwise."""
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


def _read(body: bytes, series: list[tuple[int, int, int]]) -> Samples:
    view = memoryview(body)
    labels = [json.loads(body[start + len(_START) - 1 : middle + 1]) for start, middle, _ in series]
    pieces = [bytes(view[middle + len(_MIDDLE) : end]).replace(b"],[", b"\n") for _, middle, end in series]
    lengths = np.fromiter((piece.count(b"\n") + 1 for piece in pieces), dtype=np.int64, count=len(pieces))
    table = pa.csv.read_csv(
        io.BytesIO(b"\n".join(pieces).translate(None, b'"')),
        read_options=pa.csv.ReadOptions(column_names=["time", "value"]),
        parse_options=pa.csv.ParseOptions(quote_char=False),
        convert_options=pa.csv.ConvertOptions(
            column_types={"time": pa.float64(), "value": pa.float64()}, null_values=_NOT_FINITE
        ),
    )
    seconds, value = table["time"].to_numpy(), table["value"].to_numpy()
    finite = np.where(np.isfinite(value), value, np.nan)
    return Samples(labels, lengths, np.rint(seconds * 1000).astype(np.int64), finite)


def _from_objects(result: list[dict[str, Any]]) -> Samples:
    values = [pair for series in result for pair in series["values"]]
    number = np.array([float(value) for _, value in values], dtype=np.float64)
    number[~np.isfinite(number)] = np.nan
    return Samples(
        [series["metric"] for series in result],
        np.array([len(series["values"]) for series in result], dtype=np.int64),
        np.array([round(float(time) * 1000) for time, _ in values], dtype=np.int64),
        number,
    )
