"""The main job, on real Slurm accounting and a real Prometheus: from what jobs did to what to ask for next."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from testbed import Cluster

from advisor.artefacts import save
from advisor.memory.calibration import Calibration, Margins
from advisor.service import train
from almanac.config import Config
from cli.demo import TIERS
from telemetry.history import load_history
from telemetry.store.store import Store

pytestmark = pytest.mark.cluster

CONFIG = """
[prometheus]
url = "{url}"
delay_s = 0
lookback_days = 1
[bindings]
prolog_dir = "{prolog_dir}"
[filters]
min_elapsed_s = 3
"""

EVERY_GPU = "16 GPUs on 4 hosts, scrape interval 1 s, dcgm: 20 of 20 counters on all of them"


@dataclass(frozen=True)
class Almanac:
    """The command line, as root on the cluster's host, with a configuration and a store of its own."""

    folder: Path
    env: dict[str, str]

    def run(self, *argv: str, ok: tuple[int, ...] = (0,), stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        whole = [
            sys.executable,
            "-m",
            "cli.main",
            "--config",
            str(self.folder / "almanac.toml"),
            "--store",
            str(self.folder / "store"),
        ]
        done = subprocess.run([*whole, *argv], env=self.env, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode in ok, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *argv: str, ok: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self.run(*argv, ok=ok).stdout)


@pytest.fixture(scope="module")
def history(cluster: Cluster) -> dict[str, list[int]]:
    """Two users' jobs: alice asks for 80 GB and peaks low, bob needs it; both also run without a constraint."""
    names = {"alice": "train-vit", "bob": "gpt-big"}
    jobs: dict[str, list[int]] = {user: [] for user in names}
    for number in range(6):
        for user, profile in (("alice", "low"), ("bob", "high")):
            options = ("--gpus=1", "-J", f"{names[user]}-{number}", "-C", "gpu&hbm80g")
            jobs[user].append(cluster.train(user, *options, profile=profile, seconds=8))
    jobs["alice"].append(cluster.train("alice", "--gpus=1", "-J", "plain-1", profile="low", seconds=8))
    jobs["bob"].append(cluster.train("bob", "--gpus=4", "-J", "plain-2", profile="low", seconds=8))
    states = cluster.lab.wait_for_jobs(*jobs["alice"], *jobs["bob"])
    assert set(states.values()) == {"COMPLETED"}
    fresh = f"timestamp(DCGM_FI_DEV_FB_USED) > {time.time():.3f}"
    wait_until("samples after the jobs' ends", lambda: cluster.prometheus.query(fresh))
    return jobs


@pytest.fixture(scope="module")
def almanac(cluster: Cluster, history: dict[str, list[int]]) -> Almanac:
    folder = cluster.lab.root / "almanac"  # every user can reach it
    folder.mkdir()
    text = CONFIG.format(url=cluster.prometheus.url, prolog_dir=cluster.prolog_dir) + TIERS
    (folder / "almanac.toml").write_text(text)
    # The lab's environment has no PYTHONPATH or HOME: what is set there wins.
    return Almanac(folder, {**os.environ, **cluster.lab.env})


@pytest.fixture(scope="module")
def ingested(almanac: Almanac) -> Any:
    outcome = almanac.json("ingest", "--json")
    calibrate_as_a_large_site(almanac.folder / "store")
    return outcome


def calibrate_as_a_large_site(root: Path) -> None:
    """Stand-ins for what fourteen jobs can never support: margins of evidence of 5 to 7 runs, as a long record would
    give them.
    """
    store = Store.open(root)
    (cluster_name,) = store.clusters()
    nothing = train(load_history(store.of(cluster_name)).head(0), Config(), 0)
    margins = {f"family/{waiting}/{trend}/*/0": Margins(3.0, 3.0) for waiting in range(3) for trend in range(3)}
    save(dataclasses.replace(nothing, calibration=Calibration(0.01, margins)), store.of(cluster_name).models_dir)


def test_ingest_reads_jobs_counters_and_bindings(ingested: Any, history: dict[str, list[int]]) -> None:
    assert all(source["error"] is None for source in ingested["sources"].values())
    assert ingested["sources"]["sacct"]["written"]["jobs"]["added"] >= 14
    assert ingested["sources"]["prometheus"]["written"]["telemetry"]["added"] > 16 * 8
    assert ingested["sources"]["prolog"]["written"]["bindings"]["added"] >= 14


def test_every_job_gets_its_own_peak_on_shared_nodes(
    almanac: Almanac, ingested: Any, history: dict[str, list[int]]
) -> None:
    peaks = {row["job_id"]: row for row in almanac.json("jobs", "-a", "-n", "0", "--json")}
    for job_id in history["alice"]:
        assert peaks[job_id]["verdict"] == "ok", peaks[job_id]
        assert peaks[job_id]["hbm_peak_mib"] == pytest.approx(20 * 1024, rel=0.1)
    for job_id in history["bob"][:6]:
        assert peaks[job_id]["hbm_peak_mib"] == pytest.approx(60 * 1024, rel=0.1)


def test_the_smaller_tier_is_advised_to_the_user_whose_jobs_peaked_low(almanac: Almanac, ingested: Any) -> None:
    asked = ("--user", "alice", "--gpus=1", "-J", "train-vit-77", "-C", "gpu&hbm80g")
    advice = almanac.json("advise", "--json", *asked)
    assert advice["tier"]["tier"] == "hbm40g"
    assert advice["tier"]["is_change"] is True
    assert advice["tier"]["option"] == "--constraint=gpu&hbm40g"
    assert advice["bound"]["runs"] == 6
    text = almanac.run("advise", *asked).stdout
    assert "hbm40g" in text
    assert "6 runs" in text


def test_a_user_may_not_look_at_another_users_jobs(almanac: Almanac, ingested: Any, cluster: Cluster) -> None:
    program = (
        "import difflib, os, cli.jobs, cli.main\n"  # nobody cannot import later from a folder of root
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"cli.main.main(['--store', {str(almanac.folder / 'store')!r}, 'jobs', '-u', 'bob'])\n"
    )
    # Even where the store's own mode would let them in.
    (almanac.folder / "store").chmod(0o755)
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=almanac.env, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "bob is another user" in done.stderr
    assert "gpt-big" not in done.stdout


def test_training_on_the_real_history_and_advising_from_it(almanac: Almanac, ingested: Any) -> None:
    almanac.run("train")
    asked = ("--user", "alice", "--gpus=1", "-J", "train-vit-78", "-C", "gpu&hbm80g")
    advice = almanac.json("advise", "--json", *asked, ok=(10,))
    assert advice["tier"]["tier"] is None, "so short a record supports no bound"
    assert 4 <= advice["duration"]["duration_s"] <= 20
    assert advice["priority"]["term"] >= 0


def test_doctor_finds_everything_in_order(almanac: Almanac, ingested: Any) -> None:
    found: list[dict[str, Any]] = []

    def shows_whole_gpus() -> bool:
        found[:] = almanac.json("doctor", "--json")
        return [each["said"] for each in found if each["name"] == "GPU counters"] == [EVERY_GPU]

    wait_until("the series of other tests' MIG instances to end", shows_whole_gpus, seen=lambda: found)
    assert [finding for finding in found if finding["status"] == "fail"] == []
    names = {finding["name"] for finding in found}
    assert {"Slurm", "accounting", "Prometheus", "GPU counters", "store", "store files"} <= names


def test_doctor_names_the_lines_of_slurm_conf_and_is_content_with_them(
    almanac: Almanac, ingested: Any, cluster: Cluster
) -> None:
    def priority() -> Any:
        (found,) = [each for each in almanac.json("doctor", "--json") if each["name"] == "priority"]
        return found

    conf = cluster.lab.slurm_conf
    text = conf.read_text()
    lines = ["PriorityMaxAge=12-0", "PriorityWeightAge=12000"]
    try:
        conf.write_text("\n".join(line for line in text.splitlines() if line not in lines) + "\n")
        cluster.lab.run("scontrol", "reconfigure")
        before = priority()
    finally:
        conf.write_text(text)
        cluster.lab.run("scontrol", "reconfigure")
    assert before["status"] == "warn"
    assert before["details"]["lines"] == lines
    assert "age does not count" in before["said"]
    after = priority()
    assert (after["status"], after["details"]["lines"]) == ("ok", [])
    assert after["said"] == "mode observe; Slurm's weights give a tau of 24.0 h, the goal is 24 h: fits"


def test_prometheus_down_for_a_while_loses_no_job(almanac: Almanac, ingested: Any, cluster: Cluster) -> None:
    cluster.prometheus.stop()
    try:
        unseen = cluster.train("alice", "--gpus=1", "-J", "train-vit-90", profile="low", seconds=8)
        cluster.lab.wait_for_jobs(unseen)
        done = almanac.run("ingest", "--json", ok=(5,))
        outcome = json.loads(done.stdout)
        assert cluster.prometheus.url.split("//")[1] in outcome["sources"]["prometheus"]["error"]
        assert outcome["sources"]["sacct"]["error"] is None
    finally:
        cluster.prometheus.start()
    seen = cluster.train("alice", "--gpus=1", "-J", "train-vit-91", profile="low", seconds=8)
    cluster.lab.wait_for_jobs(seen)
    almanac.run("ingest")
    rows = {row["job_id"]: row for row in almanac.json("jobs", "-a", "-n", "0", "--json")}
    assert rows[unseen]["hbm_peak_mib"] is None
    assert rows[unseen]["verdict"] in ("no telemetry", "low coverage")
    assert rows[seen]["verdict"] == "ok"
    assert rows[seen]["hbm_peak_mib"] == pytest.approx(20 * 1024, rel=0.1)
