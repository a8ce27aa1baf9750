"""Demand from accounting against a count second by second, and records that are incomplete, wrong or hostile."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.actions_config import NodeSet
from telemetry.power.demand import NO_NODES, REVERSED, RUNAWAY, UNREADABLE, Accounted, accounted_demand
from telemetry.power.series import NodeRuns, highest_per_minute, in_use_per_minute
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_790_000_040
"""A full minute."""
NAMES = ("n1", "n2", "n3")
SET = NodeSet("gpu", nodes="n[1-3]")


def runs_of(spans: list[tuple[int, int, tuple[int, ...]]]) -> NodeRuns:
    spans = sorted(spans)
    start, end, nodes = zip(*spans, strict=True) if spans else ((), (), ())
    return NodeRuns(
        np.array(start, dtype=np.int64), np.array(end, dtype=np.int64), np.arange(len(spans)),
        tuple(np.array(one, dtype=np.int32) for one in nodes),
    )  # fmt: skip


_SPANS = st.lists(
    st.tuples(
        st.integers(-200, 700), st.integers(1, 400), st.lists(st.integers(0, 5), max_size=4, unique=True).map(tuple)
    ).map(lambda one: (one[0], one[0] + one[1], one[2])),
    max_size=12,
)  # fmt: skip


@given(_SPANS, st.integers(1, 9))
def test_nodes_in_use_are_those_of_the_busiest_second(
    spans: list[tuple[int, int, tuple[int, ...]]], minutes: int
) -> None:
    seconds = [
        len({node for begin, until, nodes in spans if begin <= second < until for node in nodes})
        for second in range(minutes * 60)
    ]
    expected = [max(seconds[first : first + 60]) for first in range(0, minutes * 60, 60)]
    assert in_use_per_minute(runs_of(spans), 0, minutes * 60).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(-90, 400), st.integers(-5, 200), st.sampled_from([0.25, 0.5, 1, 3])), max_size=10),
    st.integers(1, 6),
)
def test_shares_add_up_in_each_second(waits: list[tuple[int, int, float]], minutes: int) -> None:
    begin, length, share = (np.array(column) for column in zip(*waits, strict=True)) if waits else [np.array([])] * 3
    level = [sum(one[2] for one in waits if one[0] <= second < one[0] + one[1]) for second in range(minutes * 60)]
    found = highest_per_minute(begin, begin + length, share, 0, minutes * 60)
    assert found.tolist() == [max(level[first : first + 60]) for first in range(0, minutes * 60, 60)]


def test_parts_are_short_where_many_nodes_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(60 * n, 60 * n + 90, tuple(range(n % 7))) for n in range(2880)]
    whole = in_use_per_minute(runs_of(spans), 0, 2 * 86400)
    monkeypatch.setattr("telemetry.power.series.MAX_PAIRS", 500)
    parts = list(runs_of(spans).windows(0, 2 * 86400))
    assert [low for low, _ in parts[1:]] == [high for _, high in parts[:-1]]
    assert (parts[0][0], parts[-1][1], len(parts)) == (0, 2 * 86400, 32)
    assert in_use_per_minute(runs_of(spans), 0, 2 * 86400).tolist() == whole.tolist()


_numbers = itertools.count(1)


def job(
    submit: int, start: int | None = None, end: int | None = None, nodes: str | None = None, **more: Any
) -> dict[str, Any]:
    """Times in seconds after T0."""
    times = {"submit_s": submit, "start_s": start, "end_s": end}
    times |= {name: more.pop(name) for name in ("eligible_s",) if name in more}
    row = {name: None if value is None else T0 + value for name, value in times.items()}
    whole = {"job_id": next(_numbers), "node_list": nodes, "node_count": 1, "cpu_count": 8, "gpu_count": 8}
    return {**whole, "partition": "gpu", **row, **more}


EARLY = job(-9000, -9000, 0, "n1")
"""Accounting is complete from its end on, and it is known what the set's nodes are and who may run there."""


def demand(store: Store, *jobs: dict[str, Any], minutes: int = 5, mark: int = 3600) -> Accounted:
    store.of("lab").write("jobs", pa.Table.from_pylist([EARLY, *jobs], schema=JOBS))
    store.of("lab").set_watermark("sacct", T0 + mark)
    return accounted_demand(store.of("lab"), SET, NAMES, T0, T0 + minutes * 60)


_NONE = {"gpu_count": None, "state": "CANCELLED"}
_RULES: dict[str, tuple[list[dict[str, Any]], list[int] | None, list[int] | None]] = {
    "every run of a requeued job counts, and between its runs it waits": (
        [job(0, 0, 50, "n1", job_id=-1, state="REQUEUED"), job(50, 120, 200, "n2", job_id=-1, state="COMPLETED")],
        [1, 0, 1, 1, 0], [1, 1, 0, 0, 0],
    ),
    "a run of no length had a node": ([job(0, 60, 60, "n1", state="FAILED")], [0, 1, 0, 0, 0], None),
    "wanted from eligible to start or cancel": (
        [
            job(0, 180, 200, "n1", eligible_s=60), job(0, None, 120, gpu_count_req=8, **_NONE),
            job(0, 240, 240, None, gpu_count_req=8, **_NONE),
        ], None, [2, 3, 2, 1, 0],
    ),
    "small jobs want a share": (
        [job(0, 0, 60, "n1"), *(job(60, 120, 130, "n1", gpu_count=2, cpu_count=1) for _ in range(5))],
        None, [0, 2, 0, 0, 0],
    ),
    "and no more than the set has": (
        [job(60, 120, 190, "n[1-3]", gpu_count=24, node_count=3) for _ in range(2)], None, [0, 3, 0, 0, 0],
    ),
    "parts of a heterogeneous job and tasks of an array": (
        [job(0, 60, 120, f"n{n}", het_job_id=7, het_offset=n - 1) for n in (1, 2)]
        + [job(0, 60 * n, 60 * n + 60, "n3", array_job_id=9, array_task_id=n) for n in (1, 2)],
        [0, 3, 1, 0, 0], [3, 1, 0, 0, 0],
    ),
    "a clock that was set back leaves no negative wait": (
        [job(100, 40, 170, "n1", eligible_s=150)], [1, 1, 1, 0, 0], [0] * 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", _RULES)
def test_nodes_used_and_wanted_per_minute(store: Store, rule: str) -> None:
    jobs, active, wanted = _RULES[rule]
    found = demand(store, *jobs)
    assert active is None or found.active.tolist() == active
    assert wanted is None or found.wanted.tolist() == wanted
    assert found.counts.dropped == {}


def test_what_still_runs_is_in_use_up_to_the_watermark_and_missing_after_it(store: Store) -> None:
    found = demand(store, job(0, 0, None, "n1"), mark=170)
    assert found.active[:2].tolist() == [1, 1]
    assert np.isnan(found.active[2:]).all() and np.isnan(found.wanted[2:]).all(), "not zero"


def test_before_the_first_record_nothing_is_known(store: Store) -> None:
    found = accounted_demand(store.of("lab"), SET, NAMES, T0, T0 + 120)
    assert np.isnan(found.active).all() and found.known_s == (0, 0)
    store.of("lab").write("jobs", pa.Table.from_pylist([job(-500, 0, 90, "n1")], schema=JOBS))
    found = accounted_demand(store.of("lab"), SET, NAMES, T0 - 600, T0 + 300)
    assert np.isnan(found.active).all(), "of the time before its end other jobs may be missing"


def test_a_run_whose_end_was_lost_ends_at_its_limit(store: Store) -> None:
    lost = job(0, 0, None, "n1", time_limit_s=60)
    found = demand(store, lost, job(0, 60, None, "n2", time_limit_s=3000), minutes=4, mark=100_000)
    assert found.active.tolist() == [1, 1, 1, 1]
    assert found.counts.notes[RUNAWAY] == 2
    late = accounted_demand(store.of("lab"), SET, NAMES, T0 + 3600, T0 + 7200)
    assert late.active.max() == 0
    assert demand(store, mark=100_000, minutes=1).active.tolist() == [1]


def test_what_is_still_pending_wants_nodes_up_to_the_watermark(store: Store) -> None:
    found = demand(store, job(0, 0, 60, "n1"), job(60, None, None), minutes=4, mark=180)
    assert found.wanted[:3].tolist() == [0, 1, 1] and np.isnan(found.wanted[3])


@pytest.mark.parametrize("later", ["n[2-5]", "n[6-9]"])
def test_a_job_wants_what_it_asks_for_wherever_it_runs_later(store: Store, later: str) -> None:
    assert demand(store, job(0, 60, 90, later, node_count=2, gpu_count=16)).wanted.tolist() == [2, 0, 0, 0, 0]
    assert demand(store, job(120, 180, 190, later, node_count=4, gpu_count=32)).wanted[2] == 3, "all nodes of the set"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({}, 1), ({"partition": "cpu"}, 0), ({"partition": "cpu,gpu"}, 1), ({"constraints": "hbm80g"}, 1),
     ({"constraints": "hbm40g"}, 0), ({"constraints": "hbm40g|hbm80g"}, 1)],
)  # fmt: skip
def test_a_job_that_never_started_counts_where_its_like_ran(store: Store, more: dict[str, Any], wanted: int) -> None:
    like = job(0, 0, 10, "n1", constraints="gpu&hbm80g")
    found = demand(store, like, job(60, None, 100, state="CANCELLED", **more))
    assert found.wanted.tolist() == [0, wanted, 0, 0, 0]


def test_records_that_make_no_sense_are_counted_and_left_out(store: Store) -> None:
    found = demand(
        store,
        *(job(0, 0, 60, nodes) for nodes in ("n[1-", "@all", "n2\n\x1b[31m", None)),
        *(job(0, 100, 50, "n1"), job(0, 60, 120, "n2")),
    )
    assert found.active.tolist() == [0, 1, 0, 0, 0]
    assert found.counts.dropped == {REVERSED: 1, UNREADABLE: 3, NO_NODES: 1}
    assert found.counts.seen == found.counts.kept + 5
    assert "\x1b" not in "".join(found.counts.examples.values())


def test_names_are_taken_as_they_are(store: Store) -> None:
    odd = ("gpu-node.site_1", "n01", "n1")
    store.of("lab").write("jobs", pa.Table.from_pylist(
        [EARLY, job(0, 0, 60, "n01"), job(0, 60, 120, "gpu-node.site_1"), job(0, 120, 180, "n001")], schema=JOBS
    ))  # fmt: skip
    store.of("lab").set_watermark("sacct", T0 + 3600)
    found = accounted_demand(store.of("lab"), SET, odd, T0, T0 + 180)
    assert found.active.tolist() == [1, 1, 0]


_RECORDS = st.lists(
    st.builds(
        lambda submit, wait, length, nodes, eligible: job(
            submit, None if wait is None else submit + wait,
            submit + length if wait is None else (None if length < 0 else submit + wait + length),
            None if wait is None else nodes, eligible_s=submit + eligible,
        ),
        st.integers(-300, 500), st.none() | st.integers(0, 200), st.integers(-40, 300),
        st.sampled_from(["n1", "n2", "n[1-2]", "n[2-4]", "n8", "n[1-3]"]), st.integers(-50, 250),
    ), max_size=8,
)  # fmt: skip


@examples(0.4)
@given(records=_RECORDS, mark=st.integers(60, 900))
def test_any_record_against_a_count_by_second(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], mark: int
) -> None:
    store = Store.create(tmp_path_factory.mktemp("any") / "store")
    found = demand(store, *records, minutes=12, mark=mark)
    listed = {"n1": {1}, "n2": {2}, "n[1-2]": {1, 2}, "n[2-4]": {2, 3}, "n8": set(), "n[1-3]": {1, 2, 3}}
    for minute in range(12):
        highest = 0
        for second in range(T0 + minute * 60, T0 + minute * 60 + 60):
            used: set[int] = set()
            for one in records:
                start, end = one["start_s"], one["end_s"]
                if start is not None and start <= second < max(end if end is not None else T0 + mark, start + 1):
                    used |= listed[one["node_list"]]
            highest = max(highest, len(used))
        if (minute + 1) * 60 <= mark:
            assert found.active[minute] == highest
        else:
            assert np.isnan(found.active[minute])
