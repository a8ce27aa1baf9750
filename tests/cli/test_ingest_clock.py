"""Marks of a clock that was once a year ahead in the store, and their repair by the next runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_accounting import CLUSTER, Accounting, job

from almanac.config import Config
from almanac.config_file import parse_config
from cli.app import App
from cli.doctor.site import check_store
from cli.ingest import live_spans, run
from telemetry.store.store import Store

NOW_S = 1_780_000_000
HOUR_S, YEAR_S = 3600, 365 * 86_400


@dataclass
class Clocked(App):
    """An App with a clock and an accounting of its own."""

    clock_s: int = NOW_S
    accounting: Any = field(default=None)

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config({"site": {"cluster": CLUSTER}})

    @property
    def commands(self) -> Any:
        return self.accounting

    def now_s(self) -> int:
        return self.clock_s

    def ingest(self, store: Store, at_s: int) -> None:
        self.clock_s = at_s
        run(store.of(CLUSTER), live_spans(self.but(store=store.of(CLUSTER)), ("sacct",)))


@pytest.fixture
def app(tmp_path: Path) -> Clocked:
    Store.create(tmp_path / "store")
    # slurmdbd's clock is right: it knows what has ended by NOW_S, and later jobs as they come.
    rows = [job(1, NOW_S - HOUR_S), job(2, NOW_S + HOUR_S)]
    app = Clocked(store_path=str(tmp_path / "store"))
    app.accounting = Accounting(lambda: min(app.clock_s, NOW_S + 12 * HOUR_S), rows)
    return app


def ended(store: Store) -> list[int]:
    jobs = store.of(CLUSTER).read("jobs", ["job_id", "end_s"]).to_pylist()
    return sorted(row["job_id"] for row in jobs if row["end_s"])


def test_a_span_that_a_clock_ahead_passed_over_is_read(app: Clocked, capsys: pytest.CaptureFixture[str]) -> None:
    """Job 2 ended 11 h before the next run: that run reads no more than 6 h before its watermark."""
    store = app.open_store()
    app.accounting.rows = app.accounting.rows[:1]
    app.ingest(store, NOW_S + YEAR_S)
    app.accounting.rows.append(job(2, NOW_S + HOUR_S))
    app.ingest(store, NOW_S + 12 * HOUR_S)
    assert ended(store) == [1, 2]
    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert "watermark of sacct was 364 d 12 h in the future: a clock was ahead" in said
    assert store.of(CLUSTER).watermark("sacct") == NOW_S + 12 * HOUR_S
    app.ingest(store, NOW_S + 13 * HOUR_S)
    assert capsys.readouterr().err == ""


def test_doctor_fails_on_a_watermark_in_the_future(app: Clocked) -> None:
    store = app.open_store()
    app.ingest(store, NOW_S)
    assert {check.status for check in check_store(app) if CLUSTER in check.name} == {"ok"}
    store.of(CLUSTER).set_watermark("sacct", NOW_S + YEAR_S)
    found = [check for check in check_store(app) if check.status == "fail"]
    assert [check.name for check in found] == [f"sacct of {CLUSTER}"]
    assert "365 d in the future" in found[0].said and "run `almanac ingest`" in found[0].todo
