"""Cost of 10,000 jobs that end within a minute: accounting queries, memory, time until all mail is out.

Run: python benchmarks/report_backlog.py (in `make bench-reports`). sacct is a stand-in that counts its queries, the
mail server is aiosmtpd in a process of its own; the store, reports with pictures and the record are real.
ALMANAC_BENCH_JOBS sets the number of jobs.
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from figures import Figure, at_most, exactly, main

sys.path.append(str(Path(__file__).parents[1] / "tests/cli"))

from fake_accounting import CLUSTER, Accounting, job

from almanac.config import Config
from almanac.config_file import parse_config
from cli.app import App
from cli.mail import mail_run
from reports.mail.record import MailRecord, record_path
from telemetry.store.schema import TELEMETRY
from telemetry.store.store import Store

HOOK = Path(__file__).parents[1] / "slurm_hooks/spool/almanac-ended.sh"
JOBS = int(os.environ.get("ALMANAC_BENCH_JOBS", "10000"))
ELAPSED_S, STEP_S = 600, 10
ARRAY, BURST, FEW = 1000, 50, 2
"""Tasks of an array, jobs of a user with a burst, and jobs of each other user."""
HOOK_MS, MOST_MIB, MOST_S = 5.0, 2048, 900


@dataclass
class BenchApp(App):
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config(self.given)


def ended_jobs(number: int, first_end_s: int) -> list[dict[str, Any]]:
    """Half are tasks of arrays, four tenths come in bursts, and a tenth two by two; all end within a minute."""
    rows = []
    for place in range(number):
        job_id, share = 1_000_000 + place, place / number
        more: dict[str, Any] = {"user": f"few{place // FEW}"}
        if share < 0.5:
            array = 1_000_000 + place // ARRAY * ARRAY
            more = {"user": f"array{place // ARRAY}", "array_job_id": array, "array_task_id": place % ARRAY}
        elif share < 0.9:
            more = {"user": f"burst{place // BURST}"}
        rows.append(job(job_id, first_end_s + place * 60 // number, ELAPSED_S, node=f"n{place // 4:05d}", **more))
    return rows


def samples(rows: list[dict[str, Any]]) -> pa.Table:
    """A GPU for each job, labeled with it, a sample every ten seconds."""
    per_job = ELAPSED_S // STEP_S
    job_id = np.repeat([row["job_id"] for row in rows], per_job)
    step = np.tile(np.arange(per_job), len(rows))
    start_s = np.repeat([row["start_s"] for row in rows], per_job)
    count = len(job_id)
    util = 60 + 30 * np.sin(step / 5 + job_id)
    columns: dict[str, Any] = {
        "host": np.repeat([row["node"] for row in rows], per_job),
        "gpu": np.repeat(np.arange(len(rows)) % 4, per_job),
        "mig": np.full(count, ""),
        "time_ms": (start_s + step * STEP_S) * 1000,
        "model": np.full(count, "NVIDIA A100-SXM4-80GB"),
        "job_label": job_id,
        "hbm_used_mib": 20_000 + 10 * (job_id % 1000) + step,
        "hbm_total_mib": np.full(count, 81_920.0),
        "gpu_util_pct": util,
        "gr_engine_active_frac": util / 100,
        "dram_active_frac": np.full(count, 0.3),
        "power_w": 80 + 3 * util,
        "energy_mj": 1e9 + step * STEP_S * 1000 * 300.0,
        "fp64_active_frac": np.zeros(count),
        "fp32_active_frac": np.full(count, 0.1),
        "fp16_active_frac": np.zeros(count),
        "tensor_active_frac": util / 400,
    }
    known = {field.name: field.type for field in TELEMETRY}
    return pa.table({name: pa.array(values).cast(known[name]) for name, values in columns.items()})


def fill(root: Path, number: int) -> list[dict[str, Any]]:
    """A site whose mail was switched on ten minutes ago: telemetry is there, accounting has not been asked yet."""
    now_s = int(time.time())
    rows = ended_jobs(number, now_s - 120)
    store = Store.create(root / "store")
    for first in range(0, number, 2000):
        store.of(CLUSTER).write("telemetry", samples(rows[first : first + 2000]))
    store.of(CLUSTER).set_watermark("sacct", now_s - 600)
    with MailRecord(record_path(root / "store")) as record:
        record.start_now(CLUSTER, now_s - 600)
    (root / "ended").mkdir(mode=0o770)
    for row in rows:
        path = root / "ended" / f"{row['job_id']}.1"
        path.write_text(f"job_id={row['job_id']}\ncluster={CLUSTER}\n")
    (root / "rows.json").write_text(json.dumps(rows))
    return rows


@contextmanager
def mail_server(folder: Path) -> Iterator[int]:
    """Serve with aiosmtpd, which keeps its mails in a Maildir; yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = ["-m", "aiosmtpd", "-n", "-l", f"127.0.0.1:{port}", "-c", "aiosmtpd.handlers.Mailbox", str(folder)]
    with subprocess.Popen([sys.executable, "-W", "ignore", *argv]) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def due(root: Path, port: int) -> None:
    """One run of the timer, in this process; prints what it cost."""
    given = {
        "site": {"cluster": CLUSTER},
        "hooks": {"advice_dir": str(root / "advice")},
        "mail": {
            "server": "127.0.0.1", "port": port, "sender": "almanac@example.org", "recipient": "{user}@example.org",
            "spool_dir": str(root / "ended"), "per_minute": 100_000,
        },
        "tiers": [
            {"name": "hbm40g", "capacity_mib": 40960, "constraint": "hbm40g"},
            {"name": "hbm80g", "capacity_mib": 81920, "constraint": "hbm80g"},
        ],
    }  # fmt: skip
    app = BenchApp(store_path=str(root / "store"), given=given)
    accounting = Accounting(time.time, json.loads((root / "rows.json").read_text()))
    app.commands = accounting  # type: ignore[assignment]
    pwd.getpwnam = lambda user: SimpleNamespace(pw_uid=2**31 - 2)  # type: ignore[assignment]  # the system knows all
    started_s, cpu_s = time.perf_counter(), time.process_time()
    with MailRecord(record_path(root / "store")) as record:
        outcome = mail_run(app, app.open_store().of(CLUSTER), record).run()
        counts = record.counts()
    print(json.dumps({
        "wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "asked": accounting.asked,
        "sent": outcome.sent, "faults": outcome.faults, "waiting": counts.waiting, "refused": counts.refused,
        "noticed": outcome.noticed,
    }))  # fmt: skip


def backlog(number: int) -> dict[str, Any]:
    """Run until nothing waits any more, and return the cost of all runs."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        fill(root, number)
        whole: dict[str, Any] = {"runs": 0, "wall_s": 0.0, "cpu_s": 0.0, "peak_mib": 0.0, "noticed": 0}
        with mail_server(root / "mail") as port:
            while whole["runs"] < 10:
                argv = [sys.executable, __file__, "--due", str(root), str(port)]
                done = subprocess.run(argv, capture_output=True, text=True, check=True)
                one = json.loads(done.stdout.splitlines()[-1])
                whole["runs"] += 1
                for key in ("wall_s", "cpu_s", "noticed"):
                    whole[key] += one[key]
                whole["peak_mib"] = max(whole["peak_mib"], one["peak_mib"])
                whole.setdefault("asked", one["asked"])
                whole.setdefault("faults", []).extend(one["faults"])
                if not one["waiting"] + one["refused"]:
                    break
        whole["mails"] = len(list((root / "mail/new").iterdir()))
        whole["left"] = len(list((root / "ended").iterdir())) + one["waiting"] + one["refused"]
        return whole


def hook_ms(folder: Path, runs: int = 500) -> list[float]:
    """Wall times of the hook as slurmctld starts it: a process, and its end."""
    env = {"ALMANAC_SPOOL_DIR": str(folder), "SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": CLUSTER}
    times = []
    for _ in range(runs):
        started_s = time.perf_counter()
        os.waitpid(os.posix_spawn(HOOK, [str(HOOK)], env), 0)
        times.append(1000 * (time.perf_counter() - started_s))
    return times


def expected_mails(number: int) -> int:
    """Runs of a job family that end within mail.family_wait_min share a mail; here, all of them end in one minute."""
    return len({(row["user"], row["name"], row["gpu_count"]) for row in ended_jobs(number, 0)})


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        times = hook_ms(Path(name))
    median_ms, slow_ms = statistics.median(times), float(np.percentile(times, 99))
    small, large = backlog(JOBS // 10), backlog(JOBS)
    mails, asked = expected_mails(JOBS), large["asked"]
    names = -(-JOBS // 5000)
    return [
        at_most("the hook, median of 500, ms", median_ms, HOOK_MS),
        Figure("the hook, 99th percentile, ms", slow_ms),
        exactly("jobs that ended within a minute", large["noticed"], JOBS),
        exactly("queries of accounting: numbers", asked["numbers"], 1),
        exactly("queries of accounting: names, 5,000 jobs each", asked["names"], names),
        exactly("mails, one for each job family", large["mails"], mails),
        exactly("runs, files and mails left over", large["left"], 0),
        at_most("until all mail is out, s", large["wall_s"], MOST_S),
        Figure("  of it CPU, s", large["cpu_s"]),
        Figure("  of a tenth of the jobs, s", small["wall_s"]),
        at_most("peak memory, MiB", large["peak_mib"], MOST_MIB),
        Figure("  of a tenth of the jobs, MiB", small["peak_mib"]),
        Figure("runs of the timer", large["runs"]),
        Figure("faults", "; ".join(large["faults"]) or "none", "none", not large["faults"]),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--due"]:
        due(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(measure)
