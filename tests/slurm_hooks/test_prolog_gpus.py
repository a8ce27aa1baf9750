"""The shipped Prolog: one record per job and node, dcgm-exporter's mapping folder, and never a failed job."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm_hooks/prolog/almanac-gpus.sh"
# What slurmd gives: no PATH among it.
JOB = {
    "SLURM_CLUSTER_NAME": "perl",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_GPUS": "1,3",
    "SLURMD_NODENAME": "n7",
    "SLURM_JOB_UID": "1001",
}


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The script as slurmd runs it, its folders below `folder`; an empty value takes a variable away."""
    variables = {
        **JOB,
        "ALMANAC_PROLOG_DIR": str(folder / "gpus"),
        "ALMANAC_HPC_JOB_DIR": str(folder / "jobs"),
        **env,
    }
    given = {name: value for name, value in variables.items() if value}
    done = subprocess.run([SCRIPT, *arguments], env=given, capture_output=True, timeout=10, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    return done


def mapping(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "jobs").iterdir()) if path.is_file()}


def test_the_record_says_which_gpus_the_job_has(tmp_path: Path) -> None:
    began = int(time.time())
    run(tmp_path)
    [record] = (tmp_path / "gpus").iterdir()
    assert re.fullmatch(r"perl\.42\.n7\.\d+", record.name)
    written = int(record.name.rpartition(".")[2])
    assert began <= written <= time.time()
    assert record.read_text() == f"job_id=42\nhost=n7\ngpus=1,3\nuid=1001\ntime={written}\n"
    assert record.stat().st_mode & 0o777 == 0o644


def test_the_epilog_writes_no_record(tmp_path: Path) -> None:
    run(tmp_path, "epilog")
    assert not (tmp_path / "gpus").exists()


@pytest.mark.parametrize("missing", ["SLURM_JOB_GPUS", "SLURM_JOB_ID", "SLURMD_NODENAME"])
def test_a_job_without_gpus_or_name_leaves_nothing(tmp_path: Path, missing: str) -> None:
    run(tmp_path, **{missing: ""})
    assert list(tmp_path.iterdir()) == []


def test_a_job_id_that_is_no_number_leaves_nothing(tmp_path: Path) -> None:
    run(tmp_path, SLURM_JOB_ID="../../etc/x")
    assert list(tmp_path.iterdir()) == []


def test_the_mapping_folder_follows_a_job_from_prolog_to_epilog(tmp_path: Path) -> None:
    run(tmp_path)
    assert mapping(tmp_path) == {"1": "42\n", "3": "42\n"}
    run(tmp_path)
    assert mapping(tmp_path) == {"1": "42\n", "3": "42\n"}
    run(tmp_path, "epilog")
    assert mapping(tmp_path) == {"1": "", "3": ""}


def test_another_job_on_a_shared_gpu_stays(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, SLURM_JOB_ID="421", SLURM_JOB_GPUS="3")
    assert mapping(tmp_path)["3"] == "42\n421\n"
    run(tmp_path, "epilog")
    assert mapping(tmp_path) == {"1": "", "3": "421\n"}


def test_a_gpu_name_that_is_no_index_is_no_file(tmp_path: Path) -> None:
    run(tmp_path, SLURM_JOB_GPUS="0,MIG-1/../../x")
    assert list(mapping(tmp_path)) == ["0"]


def test_without_a_mapping_folder_none_is_kept(tmp_path: Path) -> None:
    run(tmp_path, ALMANAC_HPC_JOB_DIR="")
    assert [path.name for path in tmp_path.iterdir()] == ["gpus"]


def test_folders_that_cannot_be_written_do_not_fail_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run(tmp_path, ALMANAC_PROLOG_DIR=str(tmp_path / "file/gpus"), ALMANAC_HPC_JOB_DIR=str(tmp_path / "file/jobs"))
    (tmp_path / "jobs/1").mkdir(parents=True)
    run(tmp_path)
    assert mapping(tmp_path) == {"3": "42\n"}
