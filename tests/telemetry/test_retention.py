"""Retention: old days go, what still needs them keeps them, and metrics never change because their samples are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from made_site import DAY, T0_S, Site, is_same, job, prolog, samples

from almanac.config import Retention
from almanac.errors import BusyError, StoreError
from telemetry.retention import Expired, remove
from telemetry.store.partitions import partition_start
from telemetry.store.progress import day_text


@pytest.fixture
def site(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Site:
    return Site(built_once("ten days", _fill))


def _fill(folder: Path) -> None:
    """Ten days; on each a job of one GPU of node n1, of which it has a sample every ten minutes. Summarized."""
    site = Site(folder)
    hours = [24 * day + 2 for day in range(10)]
    site.telemetry(*(samples("n1", 0, hour, hour + 2, hbm=1000.0 + day) for day, hour in enumerate(hours)))
    site.jobs(*(job(day, hour, hour + 2, "n1", 1) for day, hour in enumerate(hours)))
    site.bindings(*(prolog(day, "n1", 0, hour) for day, hour in enumerate(hours)))
    site.summarize()


def keep(site: Site, days: int = 3, at_day: int = 10, **limits: int) -> list[Expired]:
    """Remove as a run on that day does. Three days before day 10, the oldest day to keep is day 7."""
    limits = limits or {"telemetry_days": days}
    return remove(site.store.of("c"), Retention(**limits), T0_S + at_day * 86_400 + 3600)


def days_of(site: Site, table: str) -> list[int]:
    return sorted({partition_start(path) // 86_400 - DAY for path in site.store.of("c").files(table)})


def test_without_limits_everything_stays(site: Site) -> None:
    assert remove(site.store.of("c"), Retention(), T0_S + 10**9) == []
    assert days_of(site, "telemetry") == list(range(10))


def test_whole_days_go_from_the_disk_and_metrics_stay(site: Site) -> None:
    before = site.tables()
    (removed,) = keep(site)
    assert [day - DAY for day in removed.days] == list(range(7)) and removed.kept == ()
    assert removed.line("removed") == f"telemetry: 7 days removed ({day_text(DAY)} to {day_text(DAY + 6)}, 0.1 MB)"
    assert days_of(site, "telemetry") == [7, 8, 9]
    assert not list(site.store.root.glob(f"telemetry/*/date={day_text(DAY + 6)}"))
    assert is_same(site.tables(), before)
    assert keep(site) == [], "a second run"


def test_todays_samples_stay_under_the_smallest_limit(site: Site) -> None:
    keep(site, days=1, at_day=9)
    assert days_of(site, "telemetry") == [8, 9]


def test_metrics_survive_a_record_that_changes_after_the_samples_are_gone(site: Site) -> None:
    """A changed record, a neighbor that comes late, and a whole span computed again leave them as they are."""
    keep(site)
    before = site.tables()
    site.jobs(job(2, 50, 51.5, "n1", 1), job(77, 50, 52, "n1", 1))
    site.summarize()
    known = site.found()
    assert {number: row["hbm_peak_mib"] for (number, _), row in known.items() if number < 10} == {
        day: 1000.0 + day for day in range(10)
    }
    assert known[77, 50]["hbm_peak_mib"] is None, "the new one has no samples"
    site.summarize(None, None)
    site.summarize(T0_S, T0_S + 10 * 86_400)
    tables = site.tables()
    assert is_same(tuple(table.filter(pc.field("job_id") != 77) for table in tables), before)


def test_days_that_are_not_summarized_keep_their_samples(site: Site) -> None:
    site.telemetry(samples("n1", 0, 30, 31, hbm=5.0))
    (removed,) = keep(site)
    assert [day - DAY for day in removed.kept] == [1]
    assert days_of(site, "telemetry") == [1, 7, 8, 9]
    assert "1 older day kept, from 2025-03-10 on: jobs of it are not finished" in removed.line("removed")
    site.summarize()
    keep(site)
    assert days_of(site, "telemetry") == [7, 8, 9]


def test_a_running_job_keeps_the_samples_of_all_its_days(site: Site) -> None:
    """Also on the day on which its end is known, but its metrics are not computed."""
    site.telemetry(samples("n2", 0, 24 * 3, 24 * 3 + 2, hbm=7000.0), samples("n2", 0, 24 * 9, 24 * 9 + 2))
    site.jobs(job(50, 24 * 3, None, "n2", 1))
    site.summarize()
    keep(site)
    assert days_of(site, "telemetry") == [3, 4, 5, 6, 7, 8, 9]
    site.jobs(job(50, 24 * 3, 24 * 9 + 2, "n2", 1))
    keep(site)
    assert days_of(site, "telemetry") == [3, 4, 5, 6, 7, 8, 9]
    site.summarize()
    assert site.found()[50, 72]["hbm_peak_mib"] == 7000.0
    keep(site)
    assert days_of(site, "telemetry") == [7, 8, 9]


def test_days_of_jobs_stay_until_every_job_of_them_is_over(site: Site) -> None:
    site.jobs(job(60, 24 * 2, 24 * 8, "n3", 1), job(61, 24 * 4, None, "n4", 1))
    site.summarize()
    removed = {each.table: each for each in keep(site, jobs_days=3, job_metrics_days=3, gpu_metrics_days=3)}
    assert days_of(site, "jobs") == [2, 4, 7, 8, 9]
    assert days_of(site, "job_metrics") == days_of(site, "gpu_metrics") == [2, 4, 7, 8, 9]
    assert [day - DAY for day in removed["jobs"].kept] == [2, 4]
    assert days_of(site, "bindings") == days_of(site, "telemetry") == list(range(10)), "they have no limit"


def test_a_clock_that_is_years_ahead_removes_no_more_than_the_newest_samples_let_go(site: Site) -> None:
    keep(site, days=36, at_day=10_000)
    assert days_of(site, "telemetry") == [4, 5, 6, 7, 8, 9], "36 days before a month after day 9"


def test_advice_that_was_in_force_stays(site: Site) -> None:
    def row(day: int, key: str, predicted_s: int | None) -> dict[str, object]:
        place = {"user": "ann", "kind": "F", "name_key": key, "gpu_count": 1}
        return {**place, "published_s": T0_S + day * 86_400, "predicted_s": predicted_s}

    rows = [row(0, "a", 1), row(1, "a", 2), row(0, "b", 3), row(8, "b", 4), row(8, "a", 5)]
    site.store.of("c").write("advice", pa.Table.from_pylist(rows))
    (removed,) = keep(site, advice_days=3)
    assert removed.line("removed") == "advice: 1 replaced row removed"
    kept = site.store.of("c").read("advice", ["predicted_s"])["predicted_s"].to_pylist()
    assert sorted(kept) == [2, 3, 4, 5]


def test_samples_without_any_job_go_too(tmp_path: Path) -> None:
    site = Site(tmp_path / "store")
    site.telemetry(samples("n1", 0, 1, 2), samples("n1", 0, 24 * 9, 24 * 9 + 1))
    assert [each.kept for each in keep(site, jobs_days=1, telemetry_days=3)] == [(DAY,)], "not summarized yet"
    site.summarize()
    keep(site)
    assert days_of(site, "telemetry") == [9]


def test_a_kill_between_files_leaves_what_the_next_run_finishes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before, unlink = site.tables(), Path.unlink
    gone: list[Path] = []

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".parquet" and len(gone) == 5:
            raise KeyboardInterrupt
        gone.append(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed)
        keep(site)
    site.jobs(job(2, 50, 51.5, "n1", 1))
    site.summarize()
    assert is_same(site.tables(), before), "the samples that are left were not computed again"
    keep(site)
    assert days_of(site, "telemetry") == [7, 8, 9]


def test_a_reader_whose_files_go_or_change_meanwhile_gets_a_sentence(site: Site) -> None:
    store = site.store.of("c")
    with pytest.raises(BusyError, match="was removed while it was read: it is older than"), store.connect() as db:
        store.view(db, "telemetry", ["host"])
        keep(site)
        db.execute("SELECT count(*) FROM telemetry").fetchall()
    time.sleep(0.1)
    for rows, error in (([], StoreError), (samples("n1", 1, 24 * 9 + 2, 24 * 9 + 3), BusyError)):
        with pytest.raises(StoreError, match=r"cannot be read|was replaced while it was read") as raised:
            with store.connect():
                store.files("telemetry")
                site.telemetry(rows)
                # What DuckDB says of a file that another writer replaces between its footer and its rows.
                raise duckdb.InvalidInputException("TProtocolException: Negative size")
        assert raised.type is error
