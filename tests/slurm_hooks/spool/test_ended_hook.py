"""The shipped EpilogSlurmctld and jobcomp/script: one file per ended job, no program started, never a failure."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "slurm_hooks/spool/almanac-ended.sh"
EPILOG = {"SLURM_JOB_ID": "42", "SLURM_CLUSTER_NAME": "perl"}
JOBCOMP = {"JOBID": "42", "CLUSTER": "perl", "JOBNAME": "x\ncluster=other", "PATH": "/bin:/usr/bin"}


def run(folder: Path, env: dict[str, str]) -> list[Path]:
    """The script as slurmctld runs it: its environment alone. What lies in the folder then."""
    done = subprocess.run(
        [SCRIPT], env={"ALMANAC_SPOOL_DIR": str(folder), **env}, capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("env", [EPILOG, JOBCOMP], ids=["EpilogSlurmctld", "jobcomp"])
def test_one_file_says_which_job_ended(tmp_path: Path, env: dict[str, str]) -> None:
    [file] = run(tmp_path, env)
    assert re.fullmatch(r"42\.[0-9a-f-]{36}", file.name)
    assert file.read_bytes() == b"job_id=42\ncluster=perl\n"
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_job_that_ends_again_has_another_file(tmp_path: Path) -> None:
    run(tmp_path, EPILOG)
    assert len(run(tmp_path, EPILOG)) == 2


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO"])
def test_nothing_that_was_planted_is_written_through(tmp_path: Path, kind: str) -> None:
    """The folder is 0770: a member of almanac's group can make anything there, under any name that can be guessed."""
    target = tmp_path / "target"
    if kind == "link":
        target.write_text("precious")
    (tmp_path / "spool").mkdir()
    plant = 'mkfifo "$0/42.$$"' if kind == "FIFO" else 'ln -s "$1" "$0/42.$$"'
    env = {"ALMANAC_SPOOL_DIR": str(tmp_path / "spool"), "PATH": "/usr/bin:/bin", **EPILOG}
    argv = ["sh", "-c", f'{plant}; exec "$2"', str(tmp_path / "spool"), str(target), str(SCRIPT)]
    subprocess.run(argv, env=env, check=True, timeout=300)
    assert not target.exists() if kind == "dangling link" else kind == "FIFO" or target.read_text() == "precious"
    assert len(list((tmp_path / "spool").iterdir())) == 2


@pytest.mark.parametrize(
    "env",
    [{}, {"SLURM_JOB_ID": "../../etc/x"}, {"SLURM_JOB_ID": ""}, {**EPILOG, "SLURM_CLUSTER_NAME": "a\njob_id=7"}],
    ids=["nothing", "path", "empty", "cluster"],
)
def test_what_is_no_job_leaves_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    assert run(tmp_path, env) == []


def test_a_folder_that_is_absent_or_closed_is_no_failure(tmp_path: Path) -> None:
    assert run(tmp_path / "none", EPILOG) == []
    (tmp_path / "file").write_text("in the way")
    assert run(tmp_path / "file", EPILOG) == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_it_starts_no_program(tmp_path: Path) -> None:
    """It costs slurmctld's jobs the start of one shell, and no more."""
    trace = tmp_path / "trace"
    (tmp_path / "spool").mkdir()
    env = {"ALMANAC_SPOOL_DIR": str(tmp_path / "spool"), **EPILOG}
    subprocess.run(["strace", "-f", "-e", "trace=process", "-o", trace, SCRIPT], env=env, check=True, timeout=300)
    calls = trace.read_text()
    assert calls.count("execve(") == 1
    assert not re.search(r"\b(clone3?|v?fork)\(", calls)
