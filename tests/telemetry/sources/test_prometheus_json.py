"""The fast reader of a matrix says the same as the json module, whatever the labels hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.sources.prometheus_json import Samples, parse_answer

TIMES = st.integers(0, 4 * 10**12).map(lambda ms: ms / 1000)
VALUES = st.one_of(st.sampled_from(["NaN", "+Inf", "-Inf", "0", "1e+06", "-0"]), st.floats(allow_nan=False).map(str))
TRICKY = st.sampled_from(['"', "\\", "]]}", '},"values":[[', '{"metric":{', "\n", "é", "\x00"])
TEXTS = st.lists(st.one_of(TRICKY, st.text(max_size=5)), max_size=4).map("".join)
SERIES = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(st.sampled_from(["gpu", "Hostname", "x"]), TEXTS),
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
    assert isinstance(samples, Samples)
    assert samples.labels == [one["metric"] for one in result]
    assert samples.lengths.tolist() == [len(one["values"]) for one in result]
    assert samples.time_ms.tolist() == [round(time * 1000) for one in result for time, _ in one["values"]]
    np.testing.assert_array_equal(samples.value, as_numbers(result))


def test_other_results_stay_as_they_are() -> None:
    answer = {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "2"]}]}}
    assert parse_answer(json.dumps(answer).encode()) == answer


def test_a_warning_after_the_series_is_kept() -> None:
    result = [{"metric": {"gpu": "0"}, "values": [[1, "2"]]}]
    text = body(result).decode()[:-1] + ',"warnings":["one store is down"]}'
    assert parse_answer(text.encode())["warnings"] == ["one store is down"]


@pytest.mark.parametrize("text", [b"", b"<html>", b"[]", b'{"metric":{"a":"b"},"values":[[1,"2"]]}]', b"\xff"])
def test_what_is_no_json_object_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_answer(text)


def test_a_cut_answer_is_a_value_error() -> None:
    whole = body([{"metric": {"gpu": "0"}, "values": [[1, "2"], [2, "3"]]}] * 2)
    for end in range(len(whole)):
        with pytest.raises(ValueError):
            parse_answer(whole[:end])
