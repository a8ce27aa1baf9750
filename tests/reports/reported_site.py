"""A small site made by hand, with one job for each kind of report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from advisor.artefacts import save
from advisor.service import train
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.names import name_key
from reports.job.build import build
from reports.job.evidence import JobContext
from telemetry.history import load_history
from telemetry.metrics.summary import summarize
from telemetry.site import Site as BoundSite
from telemetry.store.schema import TABLES, TELEMETRY
from telemetry.store.store import Store

CLUSTER = "test"
NOW_S = 1_795_003_200
DAY_S, HOUR_S = 86_400, 3600
T0 = NOW_S - 20 * HOUR_S
GIB = 1024.0
HOSTILE = (
    '<script>alert(1)</script><img src="http://evil.example/x.png">{{7*7}}{% for %}{0}\r\nBcc: mallory@evil.example'
    "\x1b[31m\x1b]0;owned\x07\u202egnp.exe\u2066\x00$(reboot)`id`" + "A" * 10_000
)
CASES = {
    "balanced": 101, "idle": 201, "no-telemetry": 301, "half": 401, "out-of-memory": 501, "64-gpus": 601,
    "cancelled": 701, "requeued": 801, "mig": 901, "array-task": 1002, "hostile": 1101, "never-started": 1201,
    "failed": 1301, "timeout": 1401, "reserved": 1501,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    store: Store
    config: Config

    @cached_property
    def contexts(self) -> dict[str, JobContext]:
        """By case, built together."""
        return dict(zip(CASES, self.build(*CASES.values()), strict=True))

    def build(self, *job_ids: int, **options: Any) -> list[JobContext]:
        return build(BoundSite.of(self.store.of(CLUSTER), self.config, NOW_S), job_ids, **options)


def job(job_id: int, hosts: str, gpus: int, start_s: int, elapsed_s: int, **more: Any) -> dict[str, Any]:
    name = more.get("name", "train-1")
    return {
        "job_id": job_id, "submit_s": start_s - 60, "user": "alice", "account": "acc", "partition": "gpu",
        "qos": "normal", "state": "COMPLETED", "start_s": start_s, "end_s": start_s + elapsed_s,
        "elapsed_s": elapsed_s, "time_limit_s": 4 * HOUR_S, "node_count": max(1, gpus // 4), "node_list": hosts,
        "cpu_count": 16, "gpu_count": gpus, "gpu_count_req": gpus, "constraints": "gpu&hbm80g", "tier": "hbm80g",
        **more, "name": name, "name_key": name_key(name),
    }  # fmt: skip


def samples(
    host: str, gpu: int, start_s: int, elapsed_s: int, util: float, gib: float, *, pipe: str = "tensor",
    dram: float = 0.3, active: float = 0.2, mig: str = "", total_mib: float = 81920.0, ramp_s: int = 80,
) -> pa.Table:  # fmt: skip
    """One GPU, a sample every 10 s, with a ripple of its own; util 0 is an idle one."""
    time_s = np.arange(start_s, start_s + elapsed_s, 10)
    ripple = 1 + 0.04 * np.sin(np.arange(len(time_s)) / 3 + gpu)
    on = float(util > 0)
    columns: dict[str, Any] = {
        "host": np.full(len(time_s), host),
        "gpu": np.full(len(time_s), gpu),
        "mig": np.full(len(time_s), mig),
        "time_ms": time_s * 1000,
        "model": np.full(len(time_s), "NVIDIA A100-SXM4-80GB"),
        "hbm_used_mib": gib * GIB * np.minimum(1, 0.6 + np.arange(len(time_s)) * 4 / ramp_s),
        "hbm_total_mib": np.full(len(time_s), total_mib),
        "gr_engine_active_frac": on * np.minimum(util / 100 * ripple, 1) / (3 if mig else 1),
        "dram_active_frac": on * np.minimum(dram * ripple, 1),
        "power_w": 80 + 3 * util * ripple,
        "energy_mj": 1e9 + np.arange(len(time_s)) * 10_000 * (80 + 3 * util),
        **{f"{name}_active_frac": on * (active * ripple if name == pipe else 0 * ripple)
           for name in ("fp64", "fp32", "fp16", "tensor")},
    }  # fmt: skip
    if mig:
        columns["mig_profile"] = np.full(len(time_s), "3g.40gb")
    else:
        columns["gpu_util_pct"] = on * np.minimum(util * ripple, 100)
    known = {field.name: field.type for field in TELEMETRY}
    return pa.table({name: pa.array(values.tolist(), known[name]) for name, values in columns.items()})


def _jobs_and_samples() -> Iterator[tuple[dict[str, Any], list[pa.Table]]]:
    for number in range(30):  # whom the others are compared with; they are not alike
        start = T0 - (2 + number) * 1800
        yield (
            job(1 + number, "n90", 1, start, 900, user="bob", name=f"other-{number}"),
            [samples("n90", 0, start, 900, 3 * number + 5, 10.0 + number)],
        )
    for number in range(12):
        start = T0 - (number + 1) * DAY_S
        yield (
            job(111 + number, "n1", 4, start, 900, name=f"train-{number + 2}"),
            [samples("n1", gpu, start, 900, 90, 20.5 + number / 20) for gpu in range(4)],
        )
    yield job(101, "n1", 4, T0, HOUR_S), [samples("n1", gpu, T0, HOUR_S, 90, 21.3) for gpu in range(4)]
    yield (
        job(201, "n2", 4, T0, HOUR_S, name="lonely"),
        [samples("n2", gpu, T0, HOUR_S, 80 * (gpu == 1), 12 * (gpu == 1) + 0.5, pipe="fp32") for gpu in range(4)],
    )
    yield job(301, "n3", 4, T0, HOUR_S, name="unseen"), []
    yield job(401, "n4", 2, T0, HOUR_S, name="half"), [samples("n4", gpu, T0, 2200, 60, 30) for gpu in range(2)]
    yield (
        job(501, "n5", 1, T0, HOUR_S, name="large", state="FAILED", exit_code=1),
        [samples("n5", 0, T0, HOUR_S, 70, 79.5, pipe="fp32", dram=0.1, ramp_s=HOUR_S)],
    )
    yield (
        job(601, "m[01-16]", 64, T0, HOUR_S // 2, name="wide"),
        [
            samples(f"m{host:02d}", gpu, T0, HOUR_S // 2, 90 - 5 * host * (gpu == 3), 20 + host, pipe="fp64", dram=0.5)
            for host in range(1, 17)
            for gpu in range(4)
        ],
    )
    yield job(701, "n6", 1, T0, 600, name="stopped", state="CANCELLED"), [samples("n6", 0, T0, 600, 50, 5)]
    first = job(801, "n7", 1, T0, 600, name="again", state="REQUEUED")
    yield first, [samples("n7", 0, T0, 600, 40, 8)]
    last = job(801, "n7", 1, T0 + 2 * HOUR_S, 1200, name="again", restarts=1)
    yield last, [samples("n7", 0, T0 + 2 * HOUR_S, 1200, 85, 9, pipe="fp32", dram=0.05)]
    yield (
        job(901, "n8", 2, T0, HOUR_S, name="sliced"),
        [samples("n8", 0, T0, HOUR_S, 55, 4, mig=mig, total_mib=40192.0) for mig in ("1", "2")],
    )
    for task in range(3):
        start = T0 + task * 1200
        more = {"array_job_id": 1001, "array_task_id": task, "name": "sweep"}
        yield job(1001 + task, "n10", 1, start, 900, **more), [samples("n10", 0, start, 900, 20, 6, pipe="fp64")]
    yield job(1101, "n11", 1, T0, 900, name=HOSTILE, partition='<b onclick="x()">'), [samples("n11", 0, T0, 900, 75, 7)]
    pending = job(1201, "", 0, T0, 0, name="never", state="CANCELLED", gpu_count_req=2)
    yield pending | {"start_s": None, "elapsed_s": None, "end_s": T0}, []
    yield job(1301, "n12", 1, T0, 720, name="broken", state="FAILED", exit_code=2), [samples("n12", 0, T0, 720, 65, 7)]
    yield (
        job(1401, "n13", 2, T0, 4 * HOUR_S, name="endless", state="TIMEOUT"),
        [samples("n13", gpu, T0, 4 * HOUR_S, 60 - 45 * gpu, 7) for gpu in range(2)],
    )
    reserved = samples("n14", 0, T0, HOUR_S, 60, 60)
    place = reserved.schema.get_field_index("hbm_used_mib")
    flat = pa.array([0.75 * 81920.0] * len(reserved), pa.float32())
    yield job(1501, "n14", 1, T0, HOUR_S, name="jax"), [reserved.set_column(place, "hbm_used_mib", flat)]


TIERS = [{"name": f"hbm{size}g", "capacity_mib": size * 1024, "constraint": f"hbm{size}g"} for size in (40, 80)]
REPORTED = parse_config({"advice": {"risk": 0.05}, "tiers": TIERS})


def _fill(folder: Path) -> None:
    store = Store.create(folder / "store")
    rows, tables = zip(*_jobs_and_samples(), strict=True)
    store.of(CLUSTER).write("jobs", pa.Table.from_pylist(list(rows), TABLES["jobs"].schema))
    parts = [part for each in tables for part in each]
    store.of(CLUSTER).write("telemetry", pa.concat_tables(parts, promote_options="default"))
    summarize(store.of(CLUSTER), REPORTED, 0, NOW_S)
    history = load_history(store.of(CLUSTER), running=True)
    save(train(history, REPORTED, NOW_S), store.of(CLUSTER).models_dir)


@pytest.fixture(scope="session")
def reported(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Site:
    """The site, summarised and trained: every job of CASES, and 42 others."""
    return Site(Store.open(built_once("reported", _fill) / "store"), REPORTED)
