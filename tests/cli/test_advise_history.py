"""The part of a user's past that `almanac advise` uses."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from advisor.from_store import advise_from_store
from almanac.config import Config
from almanac.records import JobRequest
from cli.main import cli
from slurm.sbatch import script_key
from telemetry.counters import JOB_METRICS
from telemetry.site import Site
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

NOW_S, DAY_S = 1_760_000_000, 86_400


def test_runs_of_any_age_count_for_the_time_as_they_do_in_training(tmp_path: Path) -> None:
    starts_s = [NOW_S - days * DAY_S for days in (300, 200, 130, 100)]
    rows = [
        {
            "job_id": number, "submit_s": start_s, "start_s": start_s, "end_s": start_s + 600, "elapsed_s": 600,
            "user": "ann", "name": "train", "name_key": "train", "state": "COMPLETED", "gpu_count": 4,
        }
        for number, start_s in enumerate(starts_s, 1)
    ]  # fmt: skip
    store = Store.create(tmp_path / "store")
    store.of("c").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    request = JobRequest(user="ann", job_name="train", gpu_count=4)
    advice = advise_from_store(Site.of(store.of("c"), Config(), NOW_S), request)
    assert advice.duration is not None
    assert advice.duration.runs == 4


def test_the_script_speaks_for_a_name_that_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advise from the folder of the submission, as the record has it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    words = ("amber", "birch", "cedar", "dune", "ember", "fjord")
    now_s = int(time.time())
    key = {number: {"job_id": number, "submit_s": now_s - number * DAY_S} for number in range(1, 7)}
    jobs = [
        {
            **key[number], "start_s": now_s - number * DAY_S, "end_s": now_s - number * DAY_S + 600, "elapsed_s": 600,
            "user": user, "name": name, "name_key": name, "state": "COMPLETED", "gpu_count": 4,
            "script_key": script_key(user, f"sbatch -J {name} ./run.sh --lr={number}", str(tmp_path)),
        }
        for number, name in enumerate(words, 1)
    ]  # fmt: skip
    metrics = [
        {**each, "verdict": "ok", "is_preallocated": False, "hbm_peak_mib": 9000.0, "hbm_capacity_mib": 81920.0}
        for each in key.values()
    ]
    store = Store.create(tmp_path / "store")
    store.of("c").write("jobs", pa.Table.from_pylist(jobs, schema=JOBS))
    store.of("c").write("job_metrics", pa.Table.from_pylist(metrics, schema=JOB_METRICS))
    (tmp_path / "run.sh").write_text("#!/bin/sh\n#SBATCH -G4\n")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "almanac.toml"
    config.write_text('[site]\ncluster = "c"\n[[tiers]]\nname = "a"\ncapacity_mib = 40960\nconstraint = "a"\n')
    argv = ["--config", str(config), "--store", str(store.root), "advise", "--json", "-J", "zebra", "run.sh"]
    runs = []
    for arguments in (["--lr=0.5"], ["--other"]):
        said = CliRunner().invoke(cli, [*argv, *arguments])
        runs.append(json.loads(said.stdout)["evidence"])
    assert [(each["scope"], each["runs"]) for each in runs] == [("script", 6), ("similar", 0)]
