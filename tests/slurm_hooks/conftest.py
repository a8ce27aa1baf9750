"""A small site in a store, with what was learned from it; and the Lua interpreters that the modules are tried with.

Lua 5.1 is Slurm's on Debian, later ones are other sites'.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from advisor.service import Trained, train
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.names import name_key
from almanac.published.outgoing import Outgoing
from slurm_hooks.advice.publish import Published, PublishRun, publish
from telemetry.history import load_history
from telemetry.site import Site as BoundSite
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

sys.path.extend(str(Path(__file__).parent / room) for room in (".", "nodes", "mig", "power", "../cluster"))

from lua_runner import INTERPRETERS, Lua

NOW_S = 1_795_256_200
CLUSTER = "lab"
DEFAULTS: dict[str, Any] = {
    "user": "ann",
    "account": "ml",
    "partition": "gpu",
    "qos": "normal",
    "name": "train-1",
    "node_count": 1,
    "cpu_count": 32,
    "gpu_count": 4,
    "gpu_count_req": 4,
    "constraints": "gpu&hbm80g",
    "tier": "hbm80g",
    "time_limit_s": 7200,
    "state": "COMPLETED",
    "elapsed_s": 600,
    "hbm_peak_mib": 20_000.0,
}
METRICS = {"hbm_capacity_mib": 81_920.0, "is_preallocated": False, "coverage_frac": 1.0, "verdict": "ok"}


def write_jobs(store: Store, rows: list[dict[str, Any]]) -> None:
    """Jobs with their metrics; each needs job_id and submit_s."""
    jobs, metrics = [], []
    for row in rows:
        full = {**DEFAULTS, **row}
        full.setdefault("start_s", full["submit_s"] + 60)
        full.setdefault("end_s", full["start_s"] + full["elapsed_s"])
        full["name_key"] = name_key(full["name"])
        full["gpu_count_req"] = full["gpu_count"]
        peak_mib = full.pop("hbm_peak_mib")
        jobs.append(full)
        metrics.append({"job_id": full["job_id"], "submit_s": full["submit_s"], "hbm_peak_mib": peak_mib, **METRICS})
    for table, values in (("jobs", jobs), ("job_metrics", metrics)):
        schema = TABLES[table].schema
        names = list(values[0])
        store.of(CLUSTER).write(table, pa.Table.from_pylist(values, pa.schema([schema.field(name) for name in names])))


def random_jobs(jobs: int = 900) -> list[dict[str, Any]]:
    """Of users u0 to u11, three families each with a GPU count of its own, over 60 days."""
    rng = np.random.default_rng(1)
    length, memory = rng.lognormal(7, 1.2, 36), rng.uniform(4000, 70_000, 36)
    rows = []
    for number, submit_s in enumerate(np.sort(rng.integers(NOW_S - 60 * 86_400, NOW_S - 86_400, jobs)).tolist()):
        user, family = divmod(int(rng.integers(36)), 3)
        place = 3 * user + family
        tier = "hbm80g" if rng.random() < 0.6 else "hbm40g"
        rows.append(
            {
                "job_id": number + 1,
                "submit_s": submit_s,
                "user": f"u{user}",
                "name": f"fam{'abc'[family]}-run{number}",
                "gpu_count": 2**family,
                "elapsed_s": int(max(5, length[place] * rng.lognormal(0, 0.4))),
                "state": "FAILED" if rng.random() < 0.1 else "COMPLETED",
                "constraints": f"gpu&{tier}",
                "tier": tier,
                "hbm_peak_mib": float(memory[place] * rng.lognormal(0, 0.04)),
            }
        )
    return rows


@dataclass
class Site:
    """A store, models, and an advice folder to publish into. uids: by user."""

    store: Store
    config: Config
    trained: Trained | None
    root: Path
    uids: dict[str, int]
    now_s: int = NOW_S
    mode: str = "observe"

    @property
    def folder(self) -> Outgoing:
        return Outgoing(self.root)

    @property
    def bound(self) -> BoundSite:
        return BoundSite.of(self.store.of(CLUSTER), self.config, self.now_s)

    def publish(self, uids: Callable[[str], int | None] | None = None, **changes: Any) -> Published:
        options = {name: changes.pop(name) for name in ("is_dry", "processes") if name in changes}
        made = dataclasses.replace(self, **changes)
        job = PublishRun(made.bound, made.folder, made.trained, made.mode, **options)
        return publish(job, uids or self.uids.get)

    def files(self) -> dict[str, bytes]:
        """By path below the advice folder, but for the lock."""
        found = (path for path in sorted(self.root.rglob("*")) if path.is_file() and path.name != ".lock")
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}


CONFIG = {
    "advice": {"risk": 0.05},
    "tiers": [
        {"name": "hbm40g", "capacity_mib": 40960, "constraint": "hbm40g", "gpu_model": "A100-40"},
        {"name": "hbm80g", "capacity_mib": 81920, "constraint": "hbm80g", "gpu_model": "A100-80"},
    ],
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """The store of random_jobs, made once, and what is learned from it."""
    root = tmp_path_factory.mktemp("base") / "store"
    store = Store.create(root)
    write_jobs(store, random_jobs())
    return root, train(load_history(store.of(CLUSTER), running=True), parse_config(CONFIG), NOW_S)


@pytest.fixture(scope="session")
def new_site(base: tuple[Path, Trained]) -> Callable[[Path], Site]:
    """Makes sites in a folder: random jobs of u0 to u11, whose uids are 60000 and up."""

    def make(folder: Path) -> Site:
        store = Store.open(shutil.copytree(base[0], folder / "store"))
        folder.chmod(0o755)
        uids = {f"u{number}": 60_000 + number for number in range(12)}
        return Site(store, parse_config(CONFIG), base[1], folder / "advice", uids)

    return make


@pytest.fixture
def site(tmp_path: Path, new_site: Callable[[Path], Site]) -> Site:
    return new_site(tmp_path)


@pytest.fixture(scope="session")
def jobs_of() -> Callable[[Store, list[dict[str, Any]]], None]:
    return write_jobs


@pytest.fixture(scope="session", params=INTERPRETERS)
def lua(request: pytest.FixtureRequest) -> Lua:
    if shutil.which(request.param) is None:
        if request.param == "lua5.1" and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
            pytest.fail("lua5.1 is not installed, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
        pytest.skip(f"{request.param} is not installed (make test installs lua5.1 as root)")
    return Lua(request.param)
