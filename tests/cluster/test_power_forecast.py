"""The whole way on a running Slurm: a record, a trained model, live counts, and nodes that follow the forecast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from power_site import PowerSite, power_site, quick_slurm
from sites import Site

from advisor.power.lifecycle import train_node_set
from almanac.config_file import load_config
from slurm.node_sets import LiveDemand
from slurm_hooks.power.planning import StoredDemand
from telemetry.power.demand import append_counts
from telemetry.site import Site as AlmanacSite
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster

NAMES = ("n1", "n2", "n3", "n4")
DAY_S, DAYS = 86_400, 21
BUSY_S = 8 * 3600
BUDGET = {"boots_per_node": 3.0, "short_min_per_day": 60.0}
"""For nodes that all rest by night: they are woken when the first jobs of the day wait."""


@pytest.fixture
def power(_running_site: Site, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[PowerSite]:
    with quick_slurm(_running_site), power_site(site, tmp_path, capsys) as made:
        yield made


def trained_source(power: PowerSite, name: str, rises_in_s: int) -> StoredDemand:
    """A store whose last three weeks had all nodes in use for 8 hours a day, next time in rises_in_s; and its model."""
    now_s = int(time.time())
    store, cluster = Store.create(power.folder / name), power.backend.cluster()
    starts = [now_s + rises_in_s - day * DAY_S for day in range(1, DAYS)]
    busy = [
        {"job_id": 10 * day + place, "submit_s": start_s - 60, "start_s": start_s, "end_s": start_s + BUSY_S,
         "node_list": node, "node_count": 1, "gpu_count": 4, "partition": "all", "user": "alice", "state": "COMPLETED"}
        for day, start_s in enumerate(starts, 1) for place, node in enumerate(NAMES)
    ]  # fmt: skip
    store.of(cluster).write("jobs", pa.Table.from_pylist(busy, schema=JOBS))
    store.of(cluster).set_watermark("sacct", now_s)
    append_counts(store.of(cluster), "gpu", now_s - 600, LiveDemand(4, 0, 0, 0))  # the timer's run before
    config = load_config(power.folder / "almanac.toml")
    config = replace(config, power=replace(config.power, **BUDGET))
    train_node_set(AlmanacSite.of(store.of(cluster), config, now_s), config.node_sets[0], NAMES)
    return StoredDemand(store.of(cluster), config)


def test_nodes_follow_the_forecast_of_a_trained_model(power: PowerSite) -> None:
    power.source = trained_source(power, "calm", rises_in_s=13 * 3600)  # type: ignore[assignment]
    first = power("plan", "--apply")["node_sets"][0]
    assert len(first["power_down"]) >= 2, first["reason"]
    power.wait_asleep(*first["power_down"])
    assert power("plan", "--apply")["node_sets"][0]["wake"] == []

    # A job that waits needs all nodes, whatever the forecast says.
    job = power.site.sbatch("alice", "-N4", "--gpus-per-node=4", script="#!/bin/sh\nsleep 30\n")
    power("plan", "--apply")
    power.site.wait_for(job, "RUNNING")
    assert power("plan", "--apply")["node_sets"][0]["power_down"] == []
