"""`almanac place` as a person or a timer runs it, with a stand-in for Slurm's commands on PATH."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from almanac.errors import ConfigError, NoModelError, NotAllowedError
from cli.app import App
from cli.job_changes import changes, place
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.log import JobLine, JobLog
from slurm_hooks.types import run as speeds_module
from slurm_hooks.types.decide import RunTime
from telemetry.store.store import Store

SLURM = """#!/bin/sh
case "$(basename "$0") $*" in
"scontrol show config") printf 'ClusterName = demo\\nSLURM_VERSION = 22.05.8\\nJobFileAppend = 0\\n';;
"scontrol show nodes --json") echo "scontrol: unrecognized option '--json'" >&2; exit 1;;
"sinfo --json") cat {folder}/nodes.json;;
"squeue -a --json"*) cat {folder}/queue.json;;
"scontrol ") cat >{folder}/told; cat {folder}/told >>{folder}/all
    sed -i 's/"features": "[^"]*"/"features": "'"$(sed 's/.*Features=//' {folder}/told)"'"/' {folder}/queue.json;;
*) echo "unknown: $0 $*" >&2; exit 9;;
esac
"""


def site_speeds(*_: object) -> Callable[[Sequence[QueuedJob], Sequence[str]], Mapping[int, Sequence[RunTime]]]:
    return lambda jobs, types: {
        job.job_id: [RunTime("a100", 7200, 7000, 7500, 8000), RunTime("h100", 3600, 3500, 3700, 4000)] for job in jobs
    }


def config(**values: Any) -> str:
    settings = {"mode": "apply", "partitions": ["gpu"], "types": ["a100", "h100"], **values}
    return "[placement]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    for name in ("scontrol", "squeue", "sinfo"):
        (tmp_path / name).write_text(SLURM.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    nodes = [
        {"name": name, "state": "idle", "state_flags": [], "partitions": ["gpu"], "features": f"gpu,{kind}",
         "gres": "gpu:2", "gres_used": "gpu:0", "cpus": 8}
        for name, kind in (("n1", "a100"), ("n2", "h100"))
    ]  # fmt: skip
    job = {
        "job_id": 77, "user_name": "ann", "comment": "almanac:any-gpu", "job_state": "PENDING", "partition": "gpu",
        "state_reason": "Resources", "priority": 5, "submit_time": int(time.time()) - 600, "node_count": 1, "cpus": 1,
        "tres_req_str": "gres/gpu=1", "tres_per_node": "gres:gpu:1", "features": "[a100|h100]", "time_limit": 600,
        "name": "evil\x1b[31m\nJobId=9",
    }  # fmt: skip
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": nodes}))
    (tmp_path / "queue.json").write_text(json.dumps({"jobs": [job]}))
    (tmp_path / "almanac.toml").write_text(config())
    Store.create(tmp_path / "store").of("demo")
    return tmp_path


@pytest.fixture
def warnings() -> list[str]:
    """Return the standard error of `run`."""
    return []


@pytest.fixture
def run(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("PATH", f"{slurm}:/usr/bin:/bin")
    monkeypatch.setattr(speeds_module, "stored_speeds", site_speeds)
    monkeypatch.setattr("slurm_hooks.jobs.engine.LOOK_S", 0.0)

    def called(*argv: str, command: click.Command = place) -> tuple[int, str]:
        app = App(str(slurm / "almanac.toml"), str(slurm / "store"), "demo")
        code = command.main(args=list(argv), standalone_mode=False, obj=app) or 0
        printed = capsys.readouterr()
        warnings.append(printed.err)
        return int(code), printed.out

    return called


def test_plan_and_observe_send_nothing(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    code, text = run()
    assert code == 0
    assert "1 pending, 1 to change" in text
    assert "dry run: nothing was sent to Slurm" in text
    (slurm / "almanac.toml").write_text(config(mode="observe"))
    assert "dry run" in run("--apply")[1]
    assert not (slurm / "told").exists()
    assert not (slurm / "store/actions").exists()


def test_a_plan_warns_of_types_that_go_by_other_names(
    run: Callable[..., tuple[int, str]], slurm: Path, warnings: list[str]
) -> None:
    named = '[[gpu_types]]\nname = "a100"\nconstraint = "gpu_a100"\n'
    (slurm / "almanac.toml").write_text(config(types=["a100", "h100", "b200"]) + named)
    run()
    warned = "\n".join(warnings)
    assert "warning: no node of these partitions has 1 feature (b200)\ntry: correct placement.types" in warned
    assert "no [[gpu_types]] has as its constraint 3 placement types (a100, h100, b200)" in warned
    assert "no model is trained" in warned


def test_a_placement_is_listed_and_cleared(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    code, text = run("--apply", "--json")
    assert (code, json.loads(text)["outcome"]["waiting"]) == (0, 1)
    assert (slurm / "told").read_text() == "update jobid=77 Features=h100\n"
    shown = json.loads(run("--json", command=changes)[1])
    (job,) = shown["planners"]["place"]["in_queue"]
    assert (job["job_id"], job["gpu_type"], job["own"], job["states"]) == (77, "h100", "[a100|h100]", ["PENDING"])
    assert re.search(r"^  77  pending  h100 for \d+ s, own: \[a100\|h100\]$", run(command=changes)[1], re.MULTILINE)
    assert "dry run" in run("--clear")[1]
    assert "1 got their own request back" in run("--clear", "--apply")[1]
    assert (slurm / "all").read_text().splitlines()[-1] == "update jobid=77 Features=[a100|h100]"
    assert json.loads(run("--json", command=changes)[1])["planners"]["place"]["in_queue"] == []


def test_the_changes_of_all_planners(
    run: Callable[..., tuple[int, str]], slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--apply")
    now_s, app = int(time.time()), App(str(slurm / "almanac.toml"), str(slurm / "store"), "demo")
    line = JobLine("set", now_s - 60, "demo", 77, now_s, 0, "SiteFactor", "0", "500", "evil\x1b[31m", was="0")
    older = [line, replace(line, what="ignored", job_id=78), replace(line, time_s=now_s - 90_000)]
    JobLog(slurm / "store/actions", "reprioritize").append(older, now_s)
    changes.main(args=[], standalone_mode=False, obj=app)
    said = capsys.readouterr().out
    assert "reprioritize: 0 jobs in the queue with a change; last day: 1 ignored, 1 set" in said
    assert "place: 1 job in the queue with a change; last day: 1 place, 1 placed" in said
    assert "mig-raise: 0 jobs in the queue with a change; last day: nothing" in said
    assert "\x1b" not in said


def test_nothing_is_done_until_a_partition_takes_part(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    (slurm / "almanac.toml").write_text("")
    assert run("--apply") == (0, "")
    with pytest.raises(ConfigError, match="0 partitions"):
        run()


def test_no_speed_table(run: Callable[..., tuple[int, str]], slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Callable[..., Any]:
        def fail(jobs: object, types: object) -> None:
            raise NoModelError("nothing is known", "wait")

        return fail

    monkeypatch.setattr(speeds_module, "stored_speeds", absent)
    with pytest.raises(NoModelError):
        run("--apply")
    with pytest.raises(NoModelError):
        run()
    assert not (slurm / "told").exists()


def test_no_artefact_of_speeds(
    run: Callable[..., tuple[int, str]], slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs placed before get their own request back, and the error says what to do."""
    run("--apply")
    queue = json.loads((slurm / "queue.json").read_text())
    queue["jobs"].append({**queue["jobs"][0], "job_id": 78, "features": "[a100|h100]"})
    queue["jobs"][0]["comment"] = ""
    (slurm / "queue.json").write_text(json.dumps(queue))

    def absent(*_: object) -> None:
        raise NoModelError("no speeds", "run almanac train")

    monkeypatch.setattr(speeds_module, "stored_speeds", absent)
    with pytest.raises(NoModelError, match="no speeds"):
        run("--apply")
    assert (slurm / "all").read_text().splitlines()[-1] == "update jobid=77 Features=[a100|h100]"


def test_users_may_not(run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "is_operator", False)
    for words in ("", "--apply", "--clear"):
        with pytest.raises(NotAllowedError):
            run(*words.split())
