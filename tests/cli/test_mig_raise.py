"""`almanac mig raise` as a person or a timer runs it, with a stand-in for Slurm's commands on PATH."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from almanac.errors import ConfigError
from cli.app import App
from cli.job_changes import mig_raise as command
from telemetry.store.store import Store

SLURM = """#!/bin/sh
case "$(basename "$0") $*" in
"scontrol show config") printf 'ClusterName = demo\\nSLURM_VERSION = %s\\n' "$(cat {folder}/release)";;
"scontrol show nodes --json") cat {folder}/nodes.json;;
"scontrol -o show reservation") echo "No reservations in the system";;
"squeue -a --json"*) cat {folder}/queue.json;;
"scontrol ") cat >>{folder}/told; echo '{{"jobs": []}}' >{folder}/queue.json;;
*) echo "unknown: $0 $*" >&2; exit 9;;
esac
"""


def record(number: int, comment: str, **values: Any) -> dict[str, Any]:
    return {
        "job_id": number, "user_name": "a_user_with_a_very_long_name", "comment": comment, "job_state": ["PENDING"],
        "state_reason": "Resources", "priority": 5, "submit_time": int(time.time()) - 600, "partition": "gpu",
        "node_count": 1, "cpus": 1, "tres_req_str": "gres/gpu=1", "tres_per_job": "gres/gpu:a100_1g.10gb:1",
        "name": "evil\x1b[31m\nJobId=9", **values,
    }  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text(SLURM.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    node = {
        "name": "n1", "state": ["MIXED"], "partitions": ["gpu"], "gres": "gpu:a100_1g.10gb:1,gpu:a100_3g.40gb:1",
        "gres_used": "gpu:a100_1g.10gb:1(IDX:0),gpu:a100_3g.40gb:0(IDX:N/A)", "effective_cpus": 8, "alloc_cpus": 1,
    }  # fmt: skip
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": [node]}))
    jobs = [record(7, "almanac:larger"), record(8, "")]
    (tmp_path / "queue.json").write_text(json.dumps({"jobs": jobs}))
    (tmp_path / "release").write_text("24.11.5")
    (tmp_path / "almanac.toml").write_text('[mig_raise]\nmode = "apply"\n')
    Store.create(tmp_path / "store").of("demo")
    return tmp_path


@pytest.fixture
def run(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("PATH", f"{slurm}:/usr/bin:/bin")
    monkeypatch.setattr("slurm_hooks.jobs.engine.LOOK_S", 0.0)

    def called(*argv: str) -> tuple[int, str]:
        app = App(str(slurm / "almanac.toml"), str(slurm / "store"), "demo")
        code = command.main(args=list(argv), standalone_mode=False, obj=app) or 0
        return int(code), capsys.readouterr().out

    return called


def test_a_dry_run_tells_slurm_nothing_and_fits_80_columns(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    code, said = run()
    assert code == 0
    assert not (slurm / "told").exists()
    assert not (slurm / "store/actions").exists()
    assert max(map(len, said.splitlines())) <= 80
    for text in ("a100_1g.10gb", "a100_3g.40gb", "2 pending, 1 to change", "dry run"):
        assert text in said
    assert "\x1b" not in said


def test_apply_tells_slurm_and_the_log(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    code, said = run("--apply", "--json")
    assert code == 0
    told = json.loads(said)
    assert told["outcome"]["started"] == 1
    (change,) = told["changes"]
    assert (change["key"], change["old"]) == ("TresPerJob", "gres/gpu:a100_1g.10gb:1")
    assert change["new"] == "gres/gpu:a100_3g.40gb:1"
    assert (slurm / "told").read_text() == "update jobid=7 TresPerJob=gres/gpu:a100_3g.40gb:1\n"
    [log] = (slurm / "store/actions").glob("mig-raise-*.jsonl")
    assert [json.loads(line)["what"] for line in log.read_text().splitlines()] == ["raise", "raised"]
    assert "a_user" not in log.read_text()


def test_mode_off_shows_and_does_not_apply(run: Callable[..., tuple[int, str]], slurm: Path) -> None:
    (slurm / "almanac.toml").write_text("")
    assert run()[0] == 0
    with pytest.raises(ConfigError, match=r"mig_raise\.mode"):
        run("--apply")
    assert run("--clear", "--apply")[0] == 0
    assert not (slurm / "told").exists()
