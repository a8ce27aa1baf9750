"""Filters over what is known and what is not, and sorting."""

from __future__ import annotations

from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.selection import check_columns, parse_limits, words_of
from telemetry.job_selection import (
    JobQuery,
    Limit,
    UnknownTextError,
    Words,
    filtered,
    ordered,
    select_jobs,
)

ROWS = pa.table(
    {
        "id": [1, 2, 3, 4, 5],
        "account": ["a", "b", "a", "a", None],
        "job_class": ["memory", None, None, "compute", "memory"],
        "imbalance": [0.9, 0.8, None, 0.1, 0.5],
        "gpus": [4, 8, 4, None, 8],
    }
)


def ids(rows: pa.Table) -> list[int]:
    found: list[int] = rows["id"].to_pylist()
    return found


def test_a_row_without_the_metric_meets_no_filter_and_is_counted() -> None:
    found = filtered(ROWS, [], [Limit("imbalance", low=0.5)])
    assert ids(found.rows) == [1, 2, 5]
    assert (found.maybe, found.unknown) == (1, {"imbalance": 1})
    assert "1 job that may match is filtered out" in found.note()
    assert "imbalance (1)" in found.note()


def test_a_row_that_another_filter_excludes_is_not_counted_as_unknown() -> None:
    memory = Words("--class", "job_class", ("memory",), is_metric=True)
    found = filtered(ROWS, [memory, Words("--account", "account", ("b",))], [])
    assert (ids(found.rows), found.maybe, found.unknown) == ([], 1, {"job_class": 1})
    found = filtered(ROWS, [memory], [Limit("imbalance", high=0.2)])
    assert (ids(found.rows), found.maybe, found.unknown) == ([], 1, {"job_class": 1, "imbalance": 1})


def test_no_account_is_no_unknown_metric() -> None:
    found = filtered(ROWS, [Words("--account", "account", ("a",))], [])
    assert (ids(found.rows), found.maybe, found.note()) == ([1, 3, 4], 0, "")


def test_limits_hold_their_edges_and_any_whole_number() -> None:
    assert ids(filtered(ROWS, [], [Limit("imbalance", 0.1, 0.8)]).rows) == [2, 4, 5]
    huge = pa.table({"id": [2**62 + 1, 3]})
    assert ids(filtered(huge, [], [Limit("id", low=4)]).rows) == [2**62 + 1]


def test_a_word_of_no_row_names_those_there_are() -> None:
    with pytest.raises(UnknownTextError, match=r"no job has 'c'; choose one of: a, b"):
        filtered(ROWS, [Words("--account", "account", ("a", "c"))], [])
    known = Words("--state", "account", ("TIMEOUT",), known=frozenset({"TIMEOUT"}))
    assert ids(filtered(ROWS, [known], []).rows) == []
    nothing = ROWS.slice(0, 0)
    assert filtered(nothing, [Words("--account", "account", ("c",))], []).rows.num_rows == 0


def test_sorting_puts_unknown_last_either_way() -> None:
    assert ids(ordered(ROWS, "imbalance")) == [4, 5, 2, 1, 3]
    assert ids(ordered(ROWS, "-imbalance")) == [1, 2, 5, 4, 3]
    assert ids(ordered(ROWS, "gpus")) == [1, 3, 2, 5, 4]
    assert ids(ordered(ROWS, None)) == [1, 2, 3, 4, 5]


def test_jobs_are_selected_without_the_command_line() -> None:
    rows = pa.table(
        {"job_id": [1, 2, 3, 4], "submit_s": [5, 6, 7, 8], "use": [0.5, float("nan"), 0.1, None], "name": list("abcd")}
    )
    asked: list[Any] = []

    def history(
        columns: Any, since_s: Any = None, until_s: Any = None, user: Any = None, among: Any = None
    ) -> pa.Table:
        given = {name: values.to_pylist() for name, values in (among or {}).items()}
        asked.append((since_s, until_s, user, columns, given))
        chosen = rows
        for name, values in given.items():
            chosen = chosen.filter(pc.field(name).isin(values))
        return chosen.select(columns)

    newest = select_jobs(history, JobQuery(5, 9, "a", limit=2), ["job_id", "use"])
    assert newest.rows == [{"job_id": 3, "use": 0.1}, {"job_id": 4, "use": None}]
    assert (newest.matching, newest.total) == (4, 4)
    key = ["job_id", "submit_s"]
    # The values of all jobs are not read, only those of the jobs that are shown.
    assert asked == [
        (5, 9, "a", key, {}),
        (5, 9, "a", [*key, "use"], {"job_id": [3, 4], "submit_s": [7, 8]}),
    ]
    most = select_jobs(history, JobQuery(sort="-use", limit=1, limits=(Limit("use", low=0),)), ["job_id"])
    assert (most.rows, most.matching) == ([{"job_id": 1}], 2)
    assert "1 job that may match" in most.note
    assert select_jobs(history, JobQuery(job_ids=(2,)), ["use"]).rows == [{"use": None}]
    assert asked[-1] == (None, None, None, [*key, "use"], {"job_id": [2]})
    by_name = select_jobs(history, JobQuery(sort="-use", limit=3), ["name"])
    assert [row["name"] for row in by_name.rows] == ["a", "c", "b"]


def test_a_run_with_another_runs_job_id_and_submit_time_is_not_shown() -> None:
    """A row that mixes key values of two shown jobs is not shown."""
    rows = pa.table({"job_id": [1, 2, 1], "submit_s": [5, 6, 6], "use": [0.9, 0.8, 0.1]})

    def history(
        columns: Any, since_s: Any = None, until_s: Any = None, user: Any = None, among: Any = None
    ) -> pa.Table:
        return rows.select(columns)

    assert select_jobs(history, JobQuery(sort="-use", limit=2), ["use"]).rows == [{"use": 0.9}, {"use": 0.8}]


def test_an_unknown_column_names_the_nearest_and_all() -> None:
    with pytest.raises(click.BadParameter, match=r"did you mean imbalance\? `almanac jobs --helpformat`"):
        check_columns("--sort", ["imbalanse"], ["gpus", "imbalance"])


@pytest.mark.parametrize(
    "text", ["imbalance", "imbalance=", "imbalance=x", "imbalance=nan", "imbalance=inf", "other=1"]
)
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_limits([text], [], ["imbalance"])


def test_limits_and_words_are_read() -> None:
    assert parse_limits(["a=1"], ["a=2", "b=-0.5"], ["a", "b"]) == (
        Limit("a", low=1), Limit("a", high=2), Limit("b", high=-0.5),
    )  # fmt: skip
    assert words_of(("a, b", "c,")) == ("a", "b", "c")


VALUES = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.none() | st.floats(0, 1)), max_size=30)


@given(VALUES, st.floats(0, 1), st.sampled_from(["x", "y"]))
def test_each_row_matches_or_may_match_or_does_not(values: Any, low: float, word: str) -> None:
    """Against the plain rule: unknown only where no known filter excludes the row."""
    rows = pa.table(
        {
            "id": pa.array(range(len(values)), pa.int64()),
            "kind": pa.array([kind for kind, _ in values], pa.string()),
            "value": pa.array([value for _, value in values], pa.float64()),
        }
    )
    kinds = Words("--kind", "kind", (word,), known=frozenset({word}), is_metric=True)
    found = filtered(rows, [kinds], [Limit("value", low=low)])
    tests = [(None if k is None else k == word, None if v is None else v >= low) for k, v in values]
    assert ids(found.rows) == [n for n, test in enumerate(tests) if test == (True, True)]
    assert found.maybe == sum(None in test and False not in test for test in tests)
