"""`almanac summarize`: what it looks at, what it says, and to whom."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine

HEADER = "host,gpu,time_ms,gpu_util_pct,hbm_used_mib\n"
T0_S = 1_741_478_400
"""2025-03-09 00:00 UTC: at 10:00 UTC clocks in Los Angeles go from 02:00 to 03:00."""


class Almanac(CommandLine):
    """Runs the command line on a store of its own, in Los Angeles."""

    def raw(self, *argv: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        options = ["--config", str(self.folder / "almanac.toml"), "--store", str(self.folder / "store"), "-M", "c"]
        return super().raw(*options, *argv, stdin=stdin, TZ="America/Los_Angeles", **env)

    def __call__(self, *argv: str, ok: tuple[int, ...] = (0,), stdin: str | None = None, **env: str) -> str:
        done = self.raw(*argv, stdin=stdin, **env)
        assert done.returncode in ok, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *argv: str, ok: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self(*argv, "--json", ok=ok))

    def ingest(self, kind: str, text: str, *options: str) -> str:
        path = self.folder / f"{kind}.csv"
        path.write_text(text)
        return self("ingest", f"--{kind}", str(path), *options)


def counters(first_h: float, last_h: float, hbm: float = 1000.0) -> str:
    """A sample of GPU 0 of n1 every ten minutes, hours after T0_S."""
    times = range(round(T0_S + first_h * 3600), round(T0_S + last_h * 3600), 600)
    return HEADER + "".join(f"n1,0,{time_s}000,50,{hbm}\n" for time_s in times)


def jobs(*spans: tuple[int, float, float]) -> str:
    rows = ((number, round(T0_S + first * 3600), round(T0_S + last * 3600)) for number, first, last in spans)
    return "job_id,user,submit_s,start_s,end_s,gpu_count,node_count,node_list,state\n" + "".join(
        f"{number},ann,{start_s},{start_s},{end_s},1,1,n1,COMPLETED\n" for number, start_s, end_s in rows
    )


@pytest.fixture
def almanac(tmp_path: Path) -> Almanac:
    """Two days of one GPU with a job on each, not summarised yet."""
    (tmp_path / "almanac.toml").write_text("[filters]\nmin_gpu_util_pct = 0.0\n")
    almanac = Almanac(tmp_path)
    almanac.ingest("telemetry", counters(8, 12) + counters(30, 32).removeprefix(HEADER), "--no-summary")
    almanac.ingest("jobs", jobs((1, 9, 11), (2, 30, 31)), "--no-summary")
    return almanac


def test_only_days_with_new_data_are_looked_at(almanac: Almanac) -> None:
    assert almanac("summarize").splitlines() == [
        "metrics: 2 jobs: 2 ok",
        "  samples: 36 read, 18 of no job",
        "  days that had changed: 2025-03-09 to 2025-03-10",
        "  jobs that had changed: 2",
    ]
    assert almanac("summarize").startswith("metrics: nothing has changed since the last summary")
    almanac.ingest("telemetry", counters(30, 31, hbm=3000.0), "--no-summary")
    assert almanac.json("summarize") == {
        "jobs": 1,
        "verdicts": {"ok": 1},
        "attributed_by": {"whole node": 1},
        "samples": 12,
        "samples_without_job": 6,
        "days": ["2025-03-10"],
        "changed_jobs": 0,
        "kept_jobs": 0,
        "damaged_jobs": 0,
        "steps": {"jobs": 0, "steps": 0, "verdicts": {}, "samples": 0, "samples_without_step": 0},
        "hosts": {"nodes_without_telemetry": [], "hosts_without_jobs": [], "hosts_unclear": []},
        "retention": [],
    }


def test_a_changed_record_alone_is_summarised_and_said(almanac: Almanac) -> None:
    almanac("summarize")
    assert almanac.ingest("jobs", jobs((2, 30, 32)), "--no-summary")
    assert almanac("summarize").splitlines() == [
        "metrics: 1 jobs: 1 ok",
        "  samples: 0 read, 0 of no job",
        "  days that had changed: none",
        "  jobs that had changed: 1",
    ]
    assert "jobs that had changed: 1" in almanac.ingest("jobs", jobs((1, 9, 12)))


def test_ingest_summarises_what_it_changed_and_says_which_days(almanac: Almanac) -> None:
    assert "days that had changed: 2025-03-09 to 2025-03-10" in almanac.ingest("telemetry", counters(12, 13))
    assert "metrics" not in almanac.ingest("telemetry", counters(12, 13))
    assert '"metrics": null' in almanac.ingest("telemetry", counters(12, 13), "--json")


def test_a_span_is_in_local_time_and_looked_at_though_nothing_has_changed(almanac: Almanac) -> None:
    almanac("summarize")
    # 01:00 to 03:30 of the day of the change: 09:00 to 10:30 UTC, with nine samples of job 1.
    counts = almanac.json("summarize", "-S", "2025-03-09T01:00", "-E", "2025-03-09T03:30")
    assert (counts["jobs"], counts["samples"], counts["samples_without_job"], counts["days"]) == (1, 9, 0, [])
    said = almanac("summarize", "-S", "2025-03-09T01:00", "-E", "2025-03-09T03:30")
    assert said.startswith("metrics: 1 jobs: 1 ok\n")
    assert almanac.json("summarize", "-E", "2025-03-09T00:00")["jobs"] == 0


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("-S", "whenever"), 2, "not a time"),
        (("--nonsense",), 2, "No such option"),
    ],
)
def test_wrong_usage_ends_in_words(almanac: Almanac, argv: Sequence[str], code: int, said: str) -> None:
    done = almanac.raw("summarize", *argv)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_without_a_store_the_exit_code_is_4(almanac: Almanac) -> None:
    shutil.rmtree(almanac.folder / "store")
    done = almanac.raw("summarize")
    assert done.returncode == 4
    assert "there is no store here" in done.stderr


def test_a_damaged_file_ends_in_words_and_its_day_stays_open(almanac: Almanac) -> None:
    path = sorted((almanac.folder / "store" / "telemetry").rglob("*.parquet"))[0]
    whole = path.read_bytes()
    path.write_bytes(b"not parquet")
    done = almanac.raw("summarize")
    assert done.returncode == 4
    assert f"left out: {path}: no whole Parquet file" in done.stderr
    assert "almanac doctor" in done.stderr
    assert "Traceback" not in done.stderr
    path.write_bytes(whole)
    assert almanac.json("summarize")["days"] == ["2025-03-09"]


def test_strays_are_named_once_and_end_nothing(almanac: Almanac) -> None:
    store = almanac.folder / "store"
    for name in ("jobs/README", "jobs/cluster=c/date=garbage"):
        (store / name).mkdir()
        (store / name / "0000.parquet").touch()
    for argv in (("summarize",), ("jobs", "-a"), ("ingest", "--jobs", str(almanac.folder / "jobs.csv"))):
        done = almanac.raw(*argv)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("jobs/README: its name is not cluster=NAME") == (argv[0] != "ingest")
        assert done.stderr.count("jobs/cluster=c/date=garbage: its name is not date=YYYY-MM-DD") == 1
    findings = json.loads(almanac.raw("doctor", "--json").stdout)
    [strays] = [found for found in findings if found["name"] == "strays"]
    assert strays["status"] == "warn"
    assert len(strays["details"]["strays"]) == 2


BUSY = """
import sys
from pathlib import Path
from typing import Any
from telemetry.store.store import Store

with Store.open(Path(sys.argv[1])).of("c").summarizing():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_while_another_summarises_ingest_leaves_it_to_the_next_run(almanac: Almanac) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(almanac.folder / "store")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    refused = almanac.raw("summarize")
    path = almanac.folder / "more.csv"
    path.write_text(counters(12, 13))
    ingested = almanac.raw("ingest", "--telemetry", str(path))
    holder.communicate()
    assert refused.returncode == 4
    assert "another process is computing the job metrics" in refused.stderr
    assert ingested.returncode == 0
    assert "left to the next run" in ingested.stderr
    assert almanac.json("summarize")["days"] == ["2025-03-09", "2025-03-10"]
