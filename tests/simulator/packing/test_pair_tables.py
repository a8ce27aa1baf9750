"""Files of pairs: what is read, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from almanac.errors import FileFormatError
from simulator.traces.packing import PairTable, read_pairs

A, B = "('a', 1)", "('b', 1)"


def read(tmp_path: Path, table: object, gpu_type: str = "t") -> PairTable:
    path = tmp_path / "pairs.json"
    path.write_text(table if isinstance(table, str) else json.dumps({"t": table}))
    return read_pairs(path, gpu_type)


def test_speeds_are_relative_to_alone_and_hold_in_both_orders(tmp_path: Path) -> None:
    table = read(tmp_path, {A: {"null": 10, B: [8, 1]}, B: {"null": 2}})
    assert table.speeds(("a", 1), ("b", 1)) == (0.8, 0.5)
    assert table.speeds(("b", 1), ("a", 1)) == (0.5, 0.8)


def test_both_orders_are_averaged_and_a_refusal_in_one_counts(tmp_path: Path) -> None:
    both = read(tmp_path, {A: {"null": 10, B: [8, 1]}, B: {"null": 2, A: [2, 6]}})
    assert both.speeds(("a", 1), ("b", 1)) == pytest.approx((0.7, 0.75))
    refused = read(tmp_path, {A: {"null": 10, B: [8, 1]}, B: {"null": 2, A: [0, 0]}})
    assert refused.speeds(("a", 1), ("b", 1)) is None


def test_no_job_is_faster_in_a_pair_than_alone(tmp_path: Path) -> None:
    table = read(tmp_path, {A: {"null": 10, B: [11, 1]}, B: {"null": 2}})
    assert table.speeds(("a", 1), ("b", 1)) == (1.0, 0.5)


@pytest.mark.parametrize(
    "value", [[0.0, 0.0], [1.0, 0.0], [-1, 1], [1], "1,1", None, [None, 1], [True, 1], {}, [1e999, 1]]
)
def test_a_pair_without_two_positive_speeds_does_not_fit(tmp_path: Path, value: object) -> None:
    table = read(tmp_path, {A: {"null": 10, B: value}, B: {"null": 2}})
    assert table.speeds(("a", 1), ("b", 1)) is None


@pytest.mark.parametrize("row", [{"null": 0}, {"null": None}, {}, [], {"null": "fast"}, {"null": float("nan")}])
def test_a_kind_that_cannot_run_alone_is_left_out(tmp_path: Path, row: object) -> None:
    table = read(tmp_path, {A: {"null": 1.0, B: [1, 1]}, B: row, "hostile": {"null": 1}, "('c', -1)": {"null": 1}})
    assert table.kinds == (("a", 1),)
    assert not table.measured


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"t": 3}', '{"t": {}}', "[" * 100_000, '{"t": {"x": {"null": 1}}}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError):
        read(tmp_path, text)


def test_an_unknown_type_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no GPU type z"):
        read(tmp_path, {A: {"null": 1}}, "z")


def test_unequal_jobs_have_the_speeds_of_their_one_gpu_jobs(tmp_path: Path) -> None:
    four = "('a', 4)"
    table = read(tmp_path, {A: {"null": 10, B: [8, 1]}, B: {"null": 2}, four: {"null": 30, four: [15, 15]}})
    assert table.speeds(("a", 4), ("b", 1)) == (0.8, 0.5)
    assert table.speeds(("a", 4), ("a", 4)) == (0.5, 0.5)
    assert table.speeds(("b", 1), ("c", 4)) is None


def test_utilization_explains_pairs_that_saturate_a_gpu(tmp_path: Path) -> None:
    """Of a at 0.5 and b at 1.0: a shared GPU is busy where 0.5 x + 1.0 y = 1."""
    c = "('c', 1)"
    table = read(
        tmp_path,
        {A: {"null": 1, B: [0.5, 0.75], c: [1, 1]}, B: {"null": 1, B: [0.5, 0.5]}, c: {"null": 1}},
    )  # fmt: skip
    assert table.utilization == pytest.approx({"a": 0.5, "b": 1.0, "c": 0.05})
