"""The fast reader of a matrix says the same as the json module, whatever the labels hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.records import Counts
from telemetry.sources.exporters import presets
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import Point, SeriesSamples, parse_answer

TIMES = st.integers(0, 4 * 10**12).map(lambda ms: ms / 1000)
VALUES = st.one_of(st.sampled_from(["NaN", "+Inf", "-Inf", "0", "1e+06", "-0"]), st.floats(allow_nan=False).map(str))
TRICKY = st.sampled_from(['"', "\\", '"__name__":"', "]]}", '},"values":[[', '{"metric":{', "\n", "é", "\x00"])
TEXTS = st.lists(st.one_of(TRICKY, st.text(max_size=5)), max_size=4).map("".join)
SERIES = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(st.sampled_from(["gpu", "Hostname", "__name__", 'a"__name__', "x"]), TEXTS),
        "values": st.lists(st.tuples(TIMES, VALUES).map(list), min_size=1, max_size=4),
    }
)


def body(result: list[dict[str, Any]], *, indent: int | None = None) -> bytes:
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    separators = (",", ":") if indent is None else None
    return json.dumps(answer, indent=indent, separators=separators, ensure_ascii=False).encode()


def as_numbers(result: list[dict[str, Any]]) -> list[float]:
    return [float(value) if np.isfinite(float(value)) else np.nan for one in result for _, value in one["values"]]


@given(st.lists(SERIES, max_size=4), st.sampled_from([None, 1]))
def test_labels_lengths_times_and_values_are_those_of_the_json(
    result: list[dict[str, Any]], indent: int | None
) -> None:
    samples = parse_answer(body(result, indent=indent))["data"]["result"]
    assert isinstance(samples, SeriesSamples)
    assert samples.labels == [one["metric"] for one in result]
    assert samples.lengths.tolist() == [len(one["values"]) for one in result]
    assert samples.time_ms.tolist() == [round(time * 1000) for one in result for time, _ in one["values"]]
    np.testing.assert_array_equal(samples.value, as_numbers(result))


def test_a_vector_becomes_points_and_what_is_no_result_stays_as_it_is() -> None:
    answer = {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "2"]}]}}
    assert parse_answer(json.dumps(answer).encode())["data"]["result"] == [Point({}, 2.0)]
    assert parse_answer(b'{"status":"success","data":{"version":"2.42"}}')["data"] == {"version": "2.42"}


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=3),
    st.sampled_from(["1e999", "NaN", 10**400, -1, "\ud800", "]]}", [], {}, [[1, "2"]]]),
)  # fmt: skip


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """A healthy result in which one place holds something else, or is gone."""
    pairs = [[1.5, "2"], [2.5, "3"]]
    matrix = [{"metric": {"__name__": "x", "gpu": "0", "Hostname": "n1"}, "values": pairs}]
    vector = [{"metric": {"__name__": "x"}, "value": [1.5, "2"]}]
    kind = draw(st.sampled_from(["matrix", "vector", "scalar", "string"]))
    content = {"data": {"resultType": kind, "result": matrix if kind == "matrix" else vector}, "status": "success"}
    at: Any = content
    while True:
        place = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not at[place] or not isinstance(at[place], (dict, list)) or draw(st.integers(0, 3)) == 0:
            break
        at = at[place]
    if draw(st.booleans()):
        at[place] = draw(ATOMS)
    else:
        del at[place]
    return content


@examples(4)
@given(spoiled(), st.booleans())
def test_a_spoiled_answer_is_a_value_error_or_can_be_used(content: Any, is_tight: bool) -> None:
    """Whatever is taken goes through the pivot into rows."""
    text = json.dumps(content, separators=(",", ":") if is_tight else None)
    try:
        data = parse_answer(text.encode()).get("data")
    except ValueError:
        return
    found = data.get("result") if isinstance(data, dict) else None
    if isinstance(found, SeriesSamples):
        pivot = Pivot(presets()["dcgm"], "", 0, 10_000, Counts())
        pivot.add(presets()["dcgm"].named["DCGM_FI_DEV_FB_USED"], found)
        pivot.table()
        assert pivot.counts.seen == pivot.counts.kept + sum(pivot.counts.dropped.values())
    elif isinstance(found, list):
        assert all(isinstance(point, Point) and isinstance(point.value, float) for point in found)


LABELS = st.dictionaries(
    st.sampled_from(["gpu", "Hostname", "GPU_I_ID", "UUID", "modelName", "hpc_job"]),
    st.one_of(st.text(max_size=5), st.sampled_from(["0", "n1", "٣", "1e9", "-1", "9" * 30, "\ud800", "\x00"])),
)


@given(st.lists(LABELS, max_size=4))
def test_no_labels_break_a_row(labels: list[dict[str, str]]) -> None:
    result = [{"metric": {"gpu": "0", "Hostname": "n1", **each}, "values": [[1.5, "2"]]} for each in labels]
    samples = parse_answer(json.dumps({"data": {"resultType": "matrix", "result": result}}).encode())["data"]["result"]
    pivot = Pivot(presets()["dcgm"], "", 0, 10_000, Counts())
    pivot.add(presets()["dcgm"].named["DCGM_FI_DEV_FB_USED"], samples)
    assert pivot.table().num_rows <= len(labels)


def test_a_warning_after_the_series_is_kept() -> None:
    result = [{"metric": {"gpu": "0"}, "values": [[1, "2"]]}]
    text = body(result).decode()[:-1] + ',"warnings":["one store is down"]}'
    assert parse_answer(text.encode())["warnings"] == ["one store is down"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"[]",
        b"[" * 100_000,
        b"null",
        b'{"data":{"resultType":"vector","result":{}}}',
        b'{"metric":{"a":"b"},"values":[[1,"2"]]}]',
        b"\xff",
    ],
)
def test_what_is_no_json_object_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_answer(text)


def test_a_cut_answer_is_a_value_error() -> None:
    whole = body([{"metric": {"gpu": "0"}, "values": [[1, "2"], [2, "3"]]}] * 2)
    for end in range(len(whole)):
        with pytest.raises(ValueError):
            parse_answer(whole[:end])
