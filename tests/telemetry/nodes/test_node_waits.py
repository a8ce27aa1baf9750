"""What pending jobs want, as it could be known at each time: a record cut at any time says the same up to then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.actions_config import NodeSet
from demo import SiteShape, host_names, jobs_table, plan_site
from telemetry.nodes.demand import Accounted, accounted_demand
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_790_000_040
"""A full minute."""
DAY_S = 86_400
SET = NodeSet("gpu", nodes="n[1-3]")
NAMES = ("n1", "n2", "n3")
MINUTES = 30
SHOWN = ("active", "wanted", "queued")


def as_of(rows: list[dict[str, Any]], now_s: int) -> list[dict[str, Any]]:
    """The same record when sacct was read at now_s: what had not begun or ended by then is not known."""
    known = []
    for row in rows:
        if row["submit_s"] >= now_s:
            continue
        is_started = row["start_s"] is not None and row["start_s"] < now_s
        is_ended = row["end_s"] is not None and row["end_s"] <= now_s
        unknown = {} if is_started or is_ended else {"start_s": None, "node_list": None, "gpu_count": None}
        known.append({**row, **unknown, "end_s": row["end_s"] if is_ended else None})
    return known


def demand(store: Store, rows: list[dict[str, Any]], now_s: int, start_s: int, end_s: int) -> Accounted:
    store.of("lab").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    store.of("lab").set_watermark("sacct", now_s)
    return accounted_demand(store.of("lab"), SET, NAMES, start_s, end_s)


def compare(early: Accounted, late: Accounted, minutes: int) -> None:
    for name in SHOWN:
        np.testing.assert_array_equal(getattr(early, name)[:minutes], getattr(late, name)[:minutes], name)


def record(number: int, submit: int, wait: int | None, length: int, nodes: str, more: dict[str, Any]) -> dict[str, Any]:
    start = None if wait is None else T0 + submit + wait
    return {
        "job_id": number, "submit_s": T0 + submit, "start_s": start,
        "end_s": T0 + submit + length if start is None else start + length,
        "node_list": None if start is None else nodes, "node_count": nodes.count("-") + 1, "cpu_count": 8,
        "gpu_count": 8, "gpu_count_req": 8, **more,
    }  # fmt: skip


_RECORDS = st.lists(
    st.tuples(
        st.integers(-900, 1500), st.none() | st.integers(0, 900), st.integers(1, 900),
        st.sampled_from(["n1", "n2", "n[1-2]", "n8", "n[2-4]"]),
        st.fixed_dictionaries({
            "user": st.sampled_from(["u", "v"]), "name_key": st.sampled_from(["a", "b", None]),
            "partition": st.sampled_from(["gpu", "cpu", "cpu,gpu", None]),
            "constraints": st.sampled_from([None, "big", "big&fast"]),
            "time_limit_s": st.sampled_from([None, 300, 7200]),
        }),
    ), max_size=12,
)  # fmt: skip


@examples(0.4)
@given(records=_RECORDS, cut=st.integers(1, MINUTES - 1))
def test_what_happens_later_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[Any, ...]], cut: int
) -> None:
    rows = [record(number, *one) for number, one in enumerate(records)]
    rows.append(record(900, -2000, 0, 1000, "n1", {}))
    folder, now_s, end_s = tmp_path_factory.mktemp("cut"), T0 + cut * 60, T0 + MINUTES * 60
    early = demand(Store.create(folder / "early"), as_of(rows, now_s), now_s, T0, end_s)
    late = demand(Store.create(folder / "late"), rows, end_s, T0, end_s)
    compare(early, late, cut)


def test_the_queue_is_nodes_times_predicted_minutes(tmp_path: Path) -> None:
    """Two families: "a" ran for 10 minutes before, "b" for 40. Nothing is known of the user "w" but its time limit."""
    known = {"user": "u", "name_key": "a"}
    rows = [
        record(1, -4000, 0, 600, "n1", known),
        record(2, -3000, 0, 2400, "n1", {**known, "name_key": "b"}),
        record(3, 0, 120, 60, "n[1-2]", known),
        record(4, 60, 180, 60, "n3", {**known, "name_key": "b"}),
        record(5, 60, None, 120, "n3", {**known, "time_limit_s": 120}),
        record(6, 240, 60, 60, "n[1-8]", {**known, "node_count": 8}),
    ]
    found = demand(Store.create(tmp_path / "store"), rows, T0 + 3600, T0, T0 + 360)
    assert found.wanted.tolist() == [2, 3, 2, 1, 3, 0]
    most = 3 * (10 + 1) / 2  # all nodes of the set, for the median of 10 minutes and 1
    assert found.queued.tolist() == [20, 20 + 40 + 2, 40 + 2, 40, most, 0]


def test_jobs_fill_nodes_by_their_parts_of_gpus(tmp_path: Path) -> None:
    """As for pending jobs now: a node has as many as one run had of them."""
    half, whole = ({"gpu_count": 0, "gpu_count_req": 0, "cpu_count": 1, "gpu_share_count": n} for n in (4, 8))
    ran = [
        record(9, -5000, 0, 100, "n1", {}),
        record(1, -4000, 0, 4001, "n1", whole),
        record(2, -3000, 0, 3001, "n2", {"gpu_count": 0, "gpu_count_req": 0}),
    ]
    for number, (more, wanted) in enumerate(((half, 1), (whole, 2))):
        rows = [*ran, *(record(n, 0, 120, 60, "n3", more) for n in (3, 4))]
        assert (
            demand(Store.create(tmp_path / str(number)), rows, T0 + 3600, T0, T0 + 120).wanted.tolist() == [wanted] * 2
        )


def test_of_a_queue_with_a_job_of_unknown_length_nothing_is_said(tmp_path: Path) -> None:
    rows = [record(1, 0, 120, 60, "n1", {}), record(2, 60, 180, 60, "n2", {})]
    rows.append(record(3, -1000, 0, 3000, "n3", {}))
    found = demand(Store.create(tmp_path / "store"), rows, T0 + 3600, T0 - 60, T0 + 300)
    store = Store.open(tmp_path / "store")
    assert np.isnan(found.queued[:5]).all() and found.wanted[4:].tolist() == [1, 0], "unknown is not zero"
    assert found.queued[5] == 0
    store.of("lab").write("jobs", pa.Table.from_pylist([record(4, -9000, 0, 60, "n8", {})], schema=JOBS))
    again = accounted_demand(store.of("lab"), SET, NAMES, T0 - 60, T0 + 300)
    assert again.queued.tolist() == [0, 1, 2, 1, 1, 0], "a run on other nodes says something, too"


@pytest.fixture(scope="module")
def site() -> tuple[SiteShape, Any]:
    shape = SiteShape(seed=3, days=4, nodes_40=6, nodes_80=3, users=20, jobs_per_day=250, max_nodes=3)
    return shape, plan_site(shape)


@pytest.mark.parametrize("cut_s", [DAY_S, 2 * DAY_S + 7260, 3 * DAY_S])
def test_a_generated_site_cut_at_a_time_says_the_same(site: tuple[SiteShape, Any], tmp_path: Path, cut_s: int) -> None:
    shape, plan = site
    small, large = host_names(shape)[: shape.nodes_40], host_names(shape)[shape.nodes_40 :]
    for name, now_s in (("early", shape.start_s + cut_s), ("late", shape.end_s)):
        store = Store.create(tmp_path / name)
        store.of("lab").write("jobs", jobs_table(plan, now_s))
        store.of("lab").set_watermark("sacct", now_s)
    waited = 0.0
    for names in (small, large):
        node_set = NodeSet("one", nodes=",".join(names))
        early, late = (
            accounted_demand(Store.open(tmp_path / name).of("lab"), node_set, names, shape.start_s, shape.end_s)
            for name in ("early", "late")
        )
        first = (late.known_s[0] - shape.start_s) // 60 + 1
        compare(early, late, cut_s // 60)
        waited += np.nansum(late.queued[first : cut_s // 60])
    assert waited, "there was a queue"
