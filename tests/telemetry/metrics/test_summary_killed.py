"""A summary that is killed leaves its days open, and the next one ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from made_site import Site, is_same, job, samples

from telemetry.store.cluster_store import ClusterStore

SUMMARY = """
import sys
from pathlib import Path
from almanac.config import Config, Filters
from telemetry.store.store import Store
from telemetry.metrics.summary import summarize

config = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))
store = Store.open(Path(sys.argv[1]), threads=1)
with store.connect():
    pass
print("ready", flush=True)
summarize(store.of("c"), config)
"""


def test_kill_9_in_the_middle_leaves_the_days_open(site: Site) -> None:
    for number in range(12):
        site.telemetry(samples("n1", 0, 24 * number + 1, 24 * number + 2))
    site.jobs(*(job(number, 24 * number + 1, 24 * number + 2, "n1", 1) for number in range(12)))
    opened = site.open_days
    site.summarize()
    whole = site.tables()
    kills = 0
    for delay_s in (0.1, 0.25, 0.4, 0.6, 0.9):
        # New samples of every second day: six spans, each stored and closed on its own.
        for number in range(0, 12, 2):
            site.telemetry(samples("n1", 0, 24 * number + 1, 24 * number + 2, hbm=2000 + delay_s))
        argv = [sys.executable, "-c", SUMMARY, str(site.store.root)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
        still_open = site.open_days
        for (number, _), row in site.found().items():
            if number not in still_open:
                expected = 1000.0 if number % 2 else pytest.approx(2000 + delay_s)
                assert row["hbm_peak_mib"] == expected, f"day {number} was closed before its job was stored"
    assert kills >= 3, "no summary was caught in the middle"
    for number in range(0, 12, 2):
        site.telemetry(samples("n1", 0, 24 * number + 1, 24 * number + 2))
    site.summarize()
    assert opened == list(range(12))
    assert site.open_days == []
    assert is_same(site.tables(), whole)
    assert not [name for _, _, names in os.walk(site.store.root) for name in names if name.startswith(".tmp-")]


@pytest.mark.parametrize("table", ["gpu_metrics", "job_metrics"])
def test_a_summary_that_stops_at_either_table_is_ended_by_the_next(
    site: Site, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.telemetry(samples("n1", 0, 0, 24))
    site.jobs(job(1, 1, 2, "n1", 1))
    replace = ClusterStore.replace

    def stopping(store: ClusterStore, name: str, *rest: object) -> int:
        if name == table:
            raise KeyboardInterrupt
        return replace(store, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ClusterStore, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        site.summarize()
    monkeypatch.undo()
    assert site.open_days == [0]
    site.summarize()
    assert site.open_days == []
    assert site.verdicts() == {1: "ok"}
    assert site.gpus(1) == [("n1", 0, "")]
