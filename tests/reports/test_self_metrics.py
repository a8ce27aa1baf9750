"""Metrics of almanac itself: hand-computed values, in a form that Prometheus' own parser takes."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from almanac.exposition import Labels, exposition, family
from almanac.published.outgoing import outgoing_of
from cli.app import App
from cli.metrics import command
from reports.advice_outcomes import ADVICE_DAYS
from reports.mail.record import GIVEN_UP, EndedRun, MailRecord, Message, record_path
from reports.published.live import LiveJob, publish_live
from reports.self_metrics import DAY_S, AdviceOutcomes, collect, load_outcomes
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

NOW_S = 1_795_003_200
HOUR_S = 3600
PROMTOOL = shutil.which("promtool")


class Operator(App):
    is_operator = True

    def now_s(self) -> int:
        return NOW_S


def check(text: str) -> None:
    """Fails where Prometheus' own parser or linter objects."""
    if not PROMTOOL:
        pytest.skip("promtool is not installed (package prometheus)")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")


def values(store: Store) -> dict[str, float]:
    """By name and labels as they are written."""
    lines = exposition(collect(store, NOW_S)).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def write(store: Store, table: str, rows: list[dict[str, Any]]) -> None:
    store.of("c").write(table, pa.Table.from_pylist(rows, schema=TABLES[table].schema))


def parsed(text: str) -> list[Metric]:
    """The families that Prometheus would read."""
    return list(text_string_to_metric_families(text))


def test_the_format_is_escaped_and_a_family_without_samples_is_left_out() -> None:
    text = exposition(
        [
            family("a_total", "counter", "back\\slash\nline", [((("reason", 'say "no"\nor \\ {x="1"}'),), 3)]),
            family("empty", "gauge", "nothing is known", []),
            family("b", "gauge", "numbers", [((), 0.1), ((("at", "x"),), math.inf)]),
        ]
    )
    # As almanac wrote it before prometheus_client did.
    assert parsed(text) == parsed(
        "# HELP a_total back\\\\slash\\nline\n# TYPE a_total counter\n"
        'a_total{reason="say \\"no\\"\\nor \\\\ {x=\\"1\\"}"} 3\n'
        '# HELP b numbers\n# TYPE b gauge\nb 0.1\nb{at="x"} +Inf\n'
    )
    assert [line for line in text.splitlines() if line.startswith("# TYPE")] == [
        "# TYPE a_total counter",
        "# TYPE b gauge",
    ]


@given(st.lists(st.text(), min_size=1, max_size=3, unique_by=lambda text: text.encode("utf-8", "replace")))
def test_no_label_value_can_forge_a_line(texts: list[str]) -> None:
    samples: list[tuple[Labels, float]] = [((("reason", value),), 1) for value in texts]
    text = exposition([family("a_total", "counter", "a", samples)])
    assert len(text.split("\n")) == len(texts) + 3
    assert len(parsed(text)[0].samples) == len(texts)
    text.encode()


def test_prometheus_takes_hostile_label_values() -> None:
    hostile = ['x"} 5\nb 6', "\\", "\\n", "\u202e\x00\x1b[31m", "\ud800", "", "# TYPE a counter", "é" * 1000]
    check(exposition([family("a_total", "counter", "a", [((("reason", value),), 1) for value in hostile])]))


def test_of_an_empty_store_nothing_is_said_to_be_0(store: Store) -> None:
    assert [name for name in values(store) if "build_info" not in name] == []


def test_reports_as_the_record_counts_them(store: Store) -> None:
    runs = [EndedRun("c", number, NOW_S - 500, "alice", NOW_S - number, 1) for number in range(1, 7)]
    mails = [
        Message(f"<{number}@almanac>", "alice", "alice@example.org", "job", b"x", (run,))
        for number, run in enumerate(runs[:4])
    ]
    with MailRecord(record_path(store.root)) as record:
        record.notice(runs)
        for mail in mails[:3]:
            record.trying(mail, NOW_S)
        record.taken(mails[0], NOW_S)
        record.taken(mails[1], NOW_S)
        record.failed(mails[2].runs, "451 later", NOW_S)
        record.failed(mails[2].runs, "451 later", NOW_S)
        record.skip([runs[3]], GIVEN_UP, NOW_S)
        record.skip([runs[4]], 'no "GPU"', NOW_S)
    found = values(store)
    assert {name: value for name, value in found.items() if "reports" in name} == {
        'almanac_reports_sent_total{kind="job"}': 2, "almanac_reports_failed_tries_total": 2,
        "almanac_reports_given_up_total": 1, 'almanac_reports_skipped_total{reason="no \\"GPU\\""}': 1,
        "almanac_reports_waiting": 1, "almanac_reports_waiting_oldest_age_seconds": 6, "almanac_reports_refused": 1,
        "almanac_reports_refused_oldest_age_seconds": 3,
    }  # fmt: skip


def test_a_watermark_in_the_future_is_shown(store: Store) -> None:
    write(store, "jobs", [{"job_id": 1, "submit_s": NOW_S}])
    for source, mark_s in (("sacct", NOW_S + 86_400), ("prometheus", NOW_S - 90), ("report-week", NOW_S + 30)):
        store.of("c").set_watermark(source, mark_s)
    found = {name.partition("source=")[2]: value for name, value in values(store).items() if "ahead" in name}
    assert found == {'"sacct"}': 86_400, '"prometheus"}': 0, '"report-week"}': 0}


def test_how_far_behind_ingestion_is(store: Store) -> None:
    write(store, "jobs", [{"job_id": 1, "submit_s": NOW_S}])
    store.of("c").set_watermark("sacct", NOW_S - 90)
    found = values(store)
    assert found['almanac_ingest_watermark_timestamp_seconds{cluster="c",source="sacct"}'] == NOW_S - 90
    assert found['almanac_ingest_lag_seconds{cluster="c",source="sacct"}'] == 90
    assert found['almanac_metrics_backlog{cluster="c"}'] == 0
    assert not any("prometheus" in name for name in found)


def file(published_s: int, **more: Any) -> dict[str, Any]:
    return {
        "published_s": published_s, "user": "alice", "kind": "file", "name_key": "", "gpu_count": 0, "version": "1",
        "expires_s": published_s + 2 * DAY_S, **more,
    }  # fmt: skip


def row(published_s: int, **more: Any) -> dict[str, Any]:
    return {
        "published_s": published_s, "user": "alice", "kind": "F", "name_key": "train", "gpu_count": 4, "version": "1",
        "predicted_s": 1000, "tier": "hbm40g", **more,
    }  # fmt: skip


def asked(job_id: int, submit_s: int, **more: Any) -> dict[str, Any]:
    return {
        "job_id": job_id, "submit_s": submit_s, "start_s": submit_s, "end_s": submit_s + 1000, "elapsed_s": 1000,
        "user": "alice", "name_key": "train", "gpu_count": 4, "gpu_count_req": 4, "state": "COMPLETED", **more,
    }  # fmt: skip


def test_advice_counts_for_a_job_only_while_its_file_was_in_force(store: Store) -> None:
    t0 = NOW_S - 3 * DAY_S
    write(store, "advice", [file(t0), row(t0), row(t0 + HOUR_S, tier=None, predicted_s=None)])
    write(
        store,
        "jobs",
        [
            asked(1, t0, tier="hbm40g"),  # published in the same second
            asked(2, t0 + 1, tier="hbm80g"),
            asked(3, t0 + 2),
            asked(4, t0 - 1, tier="hbm40g"),  # before it was published
            asked(5, t0 + HOUR_S, tier="hbm40g"),  # the row was gone
            asked(6, t0 + 3, tier="hbm40g", user="bob"),  # has no file
            asked(7, t0 + 4, tier="hbm40g", name_key="other"),
            asked(8, t0 + 5, tier="hbm40g", gpu_count=8, gpu_count_req=8),
        ],
    )
    assert load_outcomes(store.of("c"), NOW_S).outcomes == {"followed": 1, "another tier": 1, "no tier named": 1}


def test_a_file_that_was_expired_or_taken_away_said_nothing(store: Store) -> None:
    t0 = NOW_S - 4 * DAY_S
    write(store, "advice", [file(t0), row(t0), file(t0 + HOUR_S, version=None, expires_s=None)])
    write(store, "jobs", [asked(1, t0 + HOUR_S), asked(2, t0 + 3 * DAY_S)])
    assert load_outcomes(store.of("c"), NOW_S) == AdviceOutcomes({}, 0, None, None)


def test_errors_of_forecasts_are_of_ended_jobs_of_the_window(store: Store) -> None:
    t0 = NOW_S - 3 * DAY_S
    old = NOW_S - 9 * DAY_S
    write(
        store,
        "advice",
        [
            file(t0), row(t0), row(t0, kind="G", name_key="", predicted_s=500, tier=None),
            file(old), row(old),
        ],
    )  # fmt: skip
    write(
        store,
        "jobs",
        [
            asked(1, t0 + 1, elapsed_s=1000),  # as forecast
            asked(2, t0 + 2, elapsed_s=1900),  # less than twice
            asked(3, t0 + 3, elapsed_s=100),  # a tenth
            asked(4, t0 + 4, elapsed_s=4000, name_key="other"),  # forecast by its GPU count: 500 s
            asked(5, t0 + 5, state="RUNNING", end_s=None, elapsed_s=None),
            asked(6, t0 + 6, state="REQUEUED"),
            asked(7, old + 1, elapsed_s=9),
        ],
    )
    told = load_outcomes(store.of("c"), NOW_S)
    assert told.jobs == 4
    assert told.median_abs_log_error == pytest.approx((math.log(1.9) + math.log(8)) / 2)
    assert told.share_within_2x == 0.5


def test_a_row_counts_long_after_it_changed_last_and_what_is_older_is_not_read(store: Store) -> None:
    """The store keeps the changed rows of a file that is renewed daily. Nobody else notices a damaged file."""
    t0, forgotten = NOW_S - DAY_S, NOW_S - (ADVICE_DAYS + 2) * DAY_S
    write(store, "advice", [file(forgotten), row(forgotten, name_key="old")])
    for path in store.of("c").files("advice"):
        path.write_bytes(b"PAR1 nothing PAR1")
    write(store, "advice", [file(t0), row(NOW_S - (ADVICE_DAYS - 2) * DAY_S)])
    write(store, "jobs", [asked(1, t0 + 1, tier="hbm40g"), asked(2, t0 + 1, tier="hbm40g", name_key="old")])
    assert load_outcomes(store.of("c"), NOW_S).outcomes == {"followed": 1}


def test_the_file_is_whole_readable_and_taken_by_prometheus(store: Store, tmp_path: Path) -> None:
    test_reports_as_the_record_counts_them(store)
    test_errors_of_forecasts_are_of_ended_jobs_of_the_window(store)
    store.of("c").set_watermark("prometheus", 1000)
    path = tmp_path / "almanac.prom"
    path.write_text("old")
    old_inode = path.stat().st_ino
    done = CliRunner().invoke(command, ["--textfile", str(path)], obj=Operator(store_path=str(store.root)))
    assert (done.exit_code, done.output) == (0, "")
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.stat().st_ino != old_inode
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".tmp")] == []
    text = path.read_text()
    check(text)
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")} == names
    reports = ("sent_total", "failed_tries_total", "given_up_total", "skipped_total", "waiting", "refused",
               "waiting_oldest_age_seconds", "refused_oldest_age_seconds")  # fmt: skip
    others = ("build_info", "ingest_watermark_timestamp_seconds", "ingest_lag_seconds", "metrics_backlog",
                  "ingest_watermark_ahead_seconds",
              "advice_jobs", "forecast_jobs", "forecast_median_abs_log_error", "forecast_share_within_2x")  # fmt: skip
    assert names == {f"almanac_{name}" for name in (*others, *(f"reports_{name}" for name in reports))}


def test_only_operators_and_only_names_that_are_read(store: Store, tmp_path: Path) -> None:
    class Ordinary(App):
        is_operator = False
        caller = "alice"

    refused = CliRunner().invoke(command, [], obj=Ordinary(store_path=str(store.root)))
    assert "is not an operator" in str(refused.exception)
    operator = Operator(store_path=str(store.root))
    wrong = CliRunner().invoke(command, ["--textfile", str(tmp_path / "x.txt")], obj=operator)
    assert wrong.exit_code == 2
    assert ".prom" in wrong.output
    lost = CliRunner().invoke(command, ["--textfile", "/proc/self/nothing/x.prom"], obj=operator)
    assert "cannot be written" in str(lost.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_running_gpus_by_partition_and_jobs_that_a_node_ended(store: Store) -> None:
    jobs = [LiveJob(n, str(n), "ann", part, "x", 4, 10, idle_gpus=idle)
            for n, part, idle in ((1, "gpu", 4), (2, "gpu", 1), (3, "big", 0))]  # fmt: skip
    publish_live(outgoing_of(store.root, "c"), "c", NOW_S - 60, jobs, {"ann": 1000}.get)
    ended = {"submit_s": NOW_S - 9000, "start_s": NOW_S - 8000, "end_s": NOW_S - 7000, "user": "ann", "gpu_count": 4}
    rows = [{"job_id": 5, **ended, "state": "NODE_FAIL", "node_list": "n1", "node_count": 1},
            {"job_id": 6, **ended, "state": "FAILED", "node_list": "n2", "node_count": 1}]  # fmt: skip
    write(store, "jobs", rows)
    found = {name: value for name, value in values(store).items() if "watch_" in name or "node_failures" in name}
    assert found == {
        'almanac_watch_gpus{cluster="c",partition="big"}': 4, 'almanac_watch_gpus{cluster="c",partition="gpu"}': 8,
        'almanac_watch_idle_gpus{cluster="c",partition="big"}': 0,
        'almanac_watch_idle_gpus{cluster="c",partition="gpu"}': 5,
        'almanac_node_failures{cluster="c",node="n1"}': 1,
    }  # fmt: skip
    assert not any("watch_" in line for line in exposition(collect(store, NOW_S + 600)).splitlines() if line[0] != "#")
