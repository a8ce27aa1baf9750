"""Rates and advice from a store: what is counted, what is said, and what is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest

from advisor.health.record import NODE_COLUMNS, drain_command, site_health, site_rate, stored_checkpoints
from reports.site.health import health_table
from reports.site.words import PageTable
from telemetry.store.schema import JOBS
from telemetry.store.store import ClusterStore, Store

DAY_S = 86_400
NOW_S = 20_000 * DAY_S


@pytest.fixture
def store(tmp_path: Path) -> ClusterStore:
    """Thirty days of 40 nodes with 4 GPUs: n7 fails every second day, n1 to n5 once."""
    rows = []
    for node in range(1, 41):
        for day in range(30):
            start_s = NOW_S - (30 - day) * DAY_S
            is_bad = (node == 7 and day % 2 == 0) or (node <= 5 and day == node)
            rows.append({
                "job_id": 100 * node + day, "submit_s": start_s - 60, "start_s": start_s, "user": "ann",
                "end_s": start_s + (3600 if is_bad else 20 * 3600), "gpu_count": 4, "node_count": 1,
                "node_list": f"n{node}", "state": "NODE_FAIL" if is_bad else "COMPLETED",
            })  # fmt: skip
    found = Store.create(tmp_path / "s").of("c")
    found.write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    return found


def test_the_bad_node_stands_out_with_its_evidence_and_the_command(store: ClusterStore) -> None:
    found = site_health(store, NOW_S)
    (lemon,) = found.lemons
    assert (lemon.node, lemon.failures, lemon.days) == ("n7", 15, 30)
    assert lemon.others_30d == pytest.approx(5.5 / 39, rel=0.01)
    assert found.evidence(lemon).startswith("15 failures on 30 days with jobs (other nodes: 0.14 in 30 days)")
    assert drain_command(lemon) == (
        "scontrol update nodename=n7 state=drain 'reason=almanac: 15 failures, other nodes 0.14 in 30 days'"
    )
    assert [(size.from_gpus, size.to_gpus, size.failures) for size in found.sizes] == [(3, 4, 20)]
    said = json.loads(json.dumps(found.as_dict()))
    assert len(said["failures"]) == 20 and said["lemons"][0]["drain"] == drain_command(lemon)


def test_the_table_of_nodes_is_one_for_the_terminal_and_the_page(store: ClusterStore) -> None:
    found = site_health(store, NOW_S)
    rows = found.rows()
    assert {len(row) for row in rows} == {len(NODE_COLUMNS)}
    assert rows[0][0] == "n7" and len(rows) == 6
    assert dict(zip(NODE_COLUMNS, rows[0], strict=True))["failures"] == "15"
    page = health_table(found)
    assert isinstance(page, PageTable) and page.cells == rows


def test_the_rate_alone_rates_no_node(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = site_health(store, NOW_S).rate
    monkeypatch.setattr("advisor.health.record.node_rates", None)
    monkeypatch.setattr("advisor.health.record.node_days", None)
    assert site_rate(store, NOW_S) == whole and whole.failures == 20


def test_a_repaired_node_is_forgotten(store: ClusterStore) -> None:
    assert site_health(store, NOW_S + 31 * DAY_S).nodes == []


def test_only_large_jobs_have_the_record_read(store: ClusterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"large": (512, 48 * 3600.0), "small": (1, 3600.0)}
    found = stored_checkpoints(store, NOW_S, sizes, 300)
    assert set(found) == {"large"}
    hours = (40 * 30 - 20) * 20 + 20
    assert found["large"].mttf_s == pytest.approx(3600 * hours * 4 / (20 * 512))
    assert found["large"].chance == pytest.approx(1 - math.exp(-48 * 3600 / found["large"].mttf_s))
    monkeypatch.setattr("advisor.health.record.site_rate", None)
    assert stored_checkpoints(store, NOW_S, {"small": (1, 3600.0), "none": (0, 1e9)}, 300) == {}
