"""Filters over what is known and what is not, and sorting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.selection import (
    JobFilter,
    JobQuery,
    Limit,
    UnknownTextError,
    Words,
    _first,
    check_columns,
    parse_limits,
    select_jobs,
    words_of,
)

ROWS: list[dict[str, Any]] = [
    {"id": number, "account": account, "job_class": job_class, "imbalance": imbalance, "gpus": gpus}
    for number, account, job_class, imbalance, gpus in (
        (1, "a", "memory", 0.9, 4), (2, "b", None, 0.8, 8), (3, "a", None, None, 4), (4, "a", "compute", 0.1, None),
        (5, None, "memory", 0.5, 8),
    )
]  # fmt: skip


def ids(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def filtered(
    words: Sequence[Words], limits: Sequence[Limit], rows: Sequence[Mapping[str, Any]] = ROWS
) -> tuple[list[int], JobFilter]:
    """The ids of the rows that match, and the counts."""
    found = JobFilter(words, limits)
    taken = ids(filter(found.takes, rows))
    found.check_words()
    assert (found.total, found.taken) == (len(rows), len(taken))
    return taken, found


def test_a_row_without_the_metric_meets_no_filter_and_is_counted() -> None:
    rows, found = filtered([], [Limit("imbalance", low=0.5)])
    assert rows == [1, 2, 5]
    assert (found.maybe, found.unknown) == (1, {"imbalance": 1})
    assert "1 job that may match is filtered out" in found.note()
    assert "imbalance (1)" in found.note()


def test_a_row_that_another_filter_excludes_is_not_counted_as_unknown() -> None:
    memory = Words("--where", "job_class", ("memory",), is_metric=True)
    rows, found = filtered([memory, Words("--account", "account", ("b",))], [])
    assert (rows, found.maybe, found.unknown) == ([], 1, {"job_class": 1})
    rows, found = filtered([memory], [Limit("imbalance", high=0.2)])
    assert (rows, found.maybe, found.unknown) == ([], 1, {"job_class": 1, "imbalance": 1})


def test_no_account_is_no_unknown_metric() -> None:
    rows, found = filtered([Words("--account", "account", ("a",))], [])
    assert (rows, found.maybe, found.note()) == ([1, 3, 4], 0, "")


def test_limits_hold_their_edges_and_any_whole_number() -> None:
    assert filtered([], [Limit("imbalance", 0.1, 0.8)])[0] == [2, 4, 5]
    huge = [{"id": 2**62 + 1}, {"id": 3}]
    assert filtered([], [Limit("id", low=4)], huge)[0] == [2**62 + 1]


def test_a_word_of_no_row_names_those_there_are() -> None:
    with pytest.raises(UnknownTextError, match=r"no job has 'c'; choose one of: a, b"):
        filtered([Words("--account", "account", ("a", "c"))], [])
    known = Words("--state", "account", ("TIMEOUT",), known=frozenset({"TIMEOUT"}))
    assert filtered([known], [])[0] == []
    assert filtered([Words("--account", "account", ("c",))], [], [])[0] == []


@pytest.mark.parametrize("limit", [0, 5, 3])
def test_sorting_puts_unknown_last_either_way(limit: int) -> None:
    many = limit or 5
    assert ids(_first(ROWS, "imbalance", limit)) == [4, 5, 2, 1, 3][:many]
    assert ids(_first(ROWS, "-imbalance", limit)) == [1, 2, 5, 4, 3][:many]
    assert ids(_first(ROWS, "gpus", limit)) == [1, 3, 2, 5, 4][:many]
    assert ids(_first(ROWS, None, limit)) == [1, 2, 3, 4, 5][-many:]


def test_jobs_are_selected_without_the_command_line() -> None:
    uses = (0.5, None, 0.1, None)
    rows = [{"job_id": n, "submit_s": n + 4, "use": use, "name": "abcd"[n - 1]} for n, use in enumerate(uses, 1)]
    asked: list[Any] = []

    def history(columns: Any, *given: Any) -> Iterator[dict[str, Any]]:
        among = given[3] or {}
        asked.append((*given[:3], columns, {name: list(values) for name, values in among.items()}))
        chosen = (row for row in rows if all(row[name] in values for name, values in among.items()))
        return ({name: row[name] for name in columns} for row in chosen)

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
    assert "2 jobs that may match" in most.note
    assert select_jobs(history, JobQuery(job_ids=(2,)), ["use"]).rows == [{"use": None}]
    assert asked[-1] == (None, None, None, [*key, "use"], {"job_id": [2]})
    by_name = select_jobs(history, JobQuery(sort="-use", limit=3), ["name"])
    assert [row["name"] for row in by_name.rows] == ["a", "c", "b"]


def test_a_run_with_another_runs_job_id_and_submit_time_is_not_shown() -> None:
    """A row that mixes key values of two shown jobs is not shown."""
    rows = [{"job_id": job_id, "submit_s": submit_s, "use": use} for job_id, submit_s, use in (
        (1, 5, 0.9), (2, 6, 0.8), (1, 6, 0.1),
    )]  # fmt: skip

    def history(*_: object) -> list[dict[str, Any]]:
        return rows

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
    """Compare with the plain rule: unknown only if no known filter excludes the row."""
    rows = [{"id": number, "kind": kind, "value": value} for number, (kind, value) in enumerate(values)]
    kinds = Words("--kind", "kind", (word,), known=frozenset({word}), is_metric=True)
    taken, found = filtered([kinds], [Limit("value", low=low)], rows)
    tests = [(None if k is None else k == word, None if v is None else v >= low) for k, v in values]
    assert taken == [n for n, test in enumerate(tests) if test == (True, True)]
    assert found.maybe == sum(None in test and False not in test for test in tests)
