"""`almanac advise` on jobs that can share a GPU, from the store and the trained models."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from advisor.artefacts import load, save
from advisor.memory.calibration import Calibration, Margins, class_of, pools_of
from advisor.memory.evidence import Evidence
from advisor.service import train
from almanac.config import AdviceSection, Config
from almanac.submit_config import Priority
from cli.app import App
from cli.main import cli
from slurm_hooks.advice.file import ADVICE, AdviceFile, AdviceRow
from slurm_hooks.advice.kinds import PACKING, PackingFile, PackingRow
from telemetry.counters import JOB_METRICS
from telemetry.history import load_history
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

DAY_S = 86_400
RUNS = 9
USER = pwd.getpwuid(os.getuid()).pw_name


def calibration() -> Calibration:
    steady = Evidence("family", 0, RUNS, (9.0,) * RUNS, tuple(range(RUNS)), 9.0, 9.0)
    pool = pools_of(class_of(steady))[0]
    return Calibration(AdviceSection().risk, {pool: Margins(1.0, 1.0)}, {jobs: {pool: 2.0} for jobs in (2, 3, 4)})


def make_site(root: Path, now_s: int, **metrics: Any) -> list[str]:
    """A store with RUNS runs of "sweep-#" of this user and of somebody else, and the arguments that name it."""
    key = [{"job_id": number + 1, "submit_s": now_s - (number + 1) * DAY_S // 2} for number in range(2 * RUNS)]
    jobs = [
        {
            **each, "start_s": each["submit_s"], "end_s": each["submit_s"] + 600, "elapsed_s": 600,
            "user": USER if each["job_id"] <= RUNS else "mallory", "name": f"sweep-{each['job_id']}",
            "name_key": "sweep-#" if each["job_id"] <= RUNS else "secret", "state": "COMPLETED", "gpu_count": 1,
            "node_count": 1,
        }
        for each in key
    ]  # fmt: skip
    usual = {
        "verdict": "ok", "is_preallocated": False, "hbm_peak_mib": 9000.0, "hbm_capacity_mib": 81920.0,
        "gpu_model": "A100-80", "mean_sm_active_frac": 0.4, "mean_dram_active_frac": 0.2,
        "coverage_sm_active_frac": 0.99, "coverage_dram_active_frac": 0.99, "has_profiling_fault": False,
    }  # fmt: skip
    store = Store.create(root / "store")
    cluster = store.of("c")
    cluster.write("jobs", pa.Table.from_pylist(jobs, schema=JOBS))
    cluster.write(
        "job_metrics", pa.Table.from_pylist([{**each, **usual, **metrics} for each in key], schema=JOB_METRICS)
    )
    trained = train(load_history(cluster, running=True), Config(), now_s)
    save(dataclasses.replace(trained, calibration=calibration()), cluster.models_dir)
    config = root / "almanac.toml"
    config.write_text('[site]\ncluster = "c"\n')
    return ["--config", str(config), "--store", str(store.root), "advise"]


@pytest.fixture
def now_s() -> int:
    return int(time.time()) - 60


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a site that no test changes."""
    return make_site(tmp_path_factory.mktemp("site"), int(time.time()) - 60)


ASKED = ("--array=0-9", "--gpus=1", "-J", "sweep-77", "--wrap=x")


def test_lines_say_how_to_share(argv: list[str]) -> None:
    said = CliRunner().invoke(cli, [*argv, *ASKED]).stdout.splitlines()
    place = next(number for number, line in enumerate(said) if "Pack two" in line)
    assert said[place : place + 4] == [
        "  Pack two on one GPU: each likely 0.62 to 1.00 of its speed, 1.24 to 2.00 times",
        "    the work per GPU-hour (9 runs).",
        "    Use: --array=A-B:2 and almanac-pack -- CMD {}",
        "    With MPS, each may need up to 1.7 times its run time: raise --time.",
    ]


def test_a_single_job_names_its_items(argv: list[str]) -> None:
    asked = ASKED[1:]
    assert "Use: almanac-pack --items A-B -- CMD {}" in CliRunner().invoke(cli, [*argv, *asked]).stdout
    said = json.loads(CliRunner().invoke(cli, [*argv, "--json", *asked]).stdout)["packing"]
    assert said["command"] == "almanac-pack --items A-B -- CMD {}"


def test_json_has_all_that_the_advice_rests_on(argv: list[str]) -> None:
    said = json.loads(CliRunner().invoke(cli, [*argv, "--json", *ASKED]).stdout)["packing"]
    assert (said["reason"], said["tasks"], said["runs"], said["risk"]) == ("share", 2, RUNS, 0.01)
    assert said["needed_mib"] < said["usable_mib"] == 81920 - 1024
    assert {member["name_key"] for member in said["members"]} == {"sweep-#"}
    assert "secret" not in json.dumps(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mean_sm_active_frac": None}, "Packing: 0 of the 5 measured runs needed (SM and DRAM activity)."),
        ({"is_preallocated": True}, "Packing: your runs reserve the GPU's memory at their start."),
        ({"mig_profile": "1g.10gb"}, "Packing: MIG slices are not shared further."),
    ],
)
def test_why_says_what_keeps_jobs_apart(tmp_path: Path, now_s: int, change: dict[str, Any], said: str) -> None:
    argv = make_site(tmp_path, now_s, **change)
    assert said in CliRunner().invoke(cli, [*argv, "--why", *ASKED]).stdout
    assert "Pack" not in CliRunner().invoke(cli, [*argv, *ASKED]).stdout


def test_a_site_can_switch_it_off(tmp_path: Path, now_s: int) -> None:
    argv = make_site(tmp_path, now_s)
    with (tmp_path / "almanac.toml").open("a") as file:
        file.write("[packing]\nadvise = false\n")
    assert json.loads(CliRunner().invoke(cli, [*argv, "--json", *ASKED]).stdout)["packing"] is None


def test_margins_for_two_jobs_survive_on_disk(argv: list[str]) -> None:
    loaded = load(Store(Path(argv[3])).of("c").models_dir)
    assert loaded is not None
    assert loaded.calibration == calibration()


@pytest.mark.parametrize(
    "asked",
    [
        ("--array=0-9%1", *ASKED[1:]),  # a chain
        ("--array=5", *ASKED[1:]),
        (*ASKED[:-1], "--wrap=exec almanac-pack -- x"),
        (*ASKED[:-1], "packed.sh"),
        (*ASKED, "--gres=gpu:1g.10gb:1"),
        (*ASKED, "--gres=gpu:v100:1"),
        (*ASKED, "-N1-4"),
    ],
)
def test_a_job_that_cannot_pack_or_packs_already_is_told_nothing(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("packed.sh").write_text("#!/bin/sh\nexec almanac-pack -- python train.py {}\n")
    said = CliRunner().invoke(cli, [*argv, *asked])
    assert said.exit_code == 0
    assert "almanac-pack" not in said.stdout


def test_without_the_store_the_published_note_is_shown(
    tmp_path: Path, now_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = make_site(tmp_path, now_s)
    monkeypatch.setattr(App, "may_read_store", property(lambda _: False))
    own = tmp_path / "advice" / "user" / str(os.getuid())
    own.mkdir(parents=True)
    with (tmp_path / "almanac.toml").open("a") as config:
        config.write(f'[hooks]\nadvice_dir = "{tmp_path}/advice"\n')
    row = AdviceRow("F", 600, 0, "sweep-#", 1)
    file = AdviceFile("v", now_s, now_s + 3600, "observe", False, "ask", Priority(), (), (row,))
    (own / ADVICE.name).write_bytes(ADVICE.render(file))
    text = "Pack two on one GPU: each likely 0.62 to 1.00 of its speed. Use: --array=A-B:2 and almanac-pack -- CMD {}"
    packing = PackingFile(now_s, now_s + 3600, (PackingRow("sweep-#", 1, 20_000, text),))
    (own / PACKING.name).write_bytes(PACKING.render(packing))
    said = CliRunner().invoke(cli, [*argv, *ASKED])
    assert said.stdout.splitlines()[-2:] == [
        "  Pack two on one GPU: each likely 0.62 to 1.00 of its speed. Use:",
        "    --array=A-B:2 and almanac-pack -- CMD {}",
    ]
    assert said.stderr == ""
    newer = ADVICE.render(file).replace(b'"rows":', b'"energy_kwh":[1],"rows":', 1)
    (own / ADVICE.name).write_bytes(newer.replace(b'"gpus":1', b'"gpus":1,"color":"red"'))
    said = CliRunner().invoke(cli, [*argv, *ASKED])
    assert said.stdout.splitlines()[-2].startswith("  Pack two on one GPU")
    assert said.stderr == "note: published by a newer almanac; not shown: color, energy_kwh\n"
    assert json.loads(CliRunner().invoke(cli, [*argv, "--json", *ASKED]).stdout)["packing"]["text"] == text
    for other in (ASKED[1:], (*ASKED[:-1], "--wrap=almanac-pack -- x"), (*ASKED, "-N2")):
        assert "almanac-pack" not in CliRunner().invoke(cli, [*argv, *other]).stdout
        assert json.loads(CliRunner().invoke(cli, [*argv, "--json", *other]).stdout)["packing"] is None
