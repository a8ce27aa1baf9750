"""The shipped Prolog: one record per job and node, dcgm-exporter's mapping folder, and never a failed job."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "slurm_hooks/prolog/almanac-gpus.sh"
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
        "ALMANAC_MIG_MAP": str(folder / "run/mig"),
        **env,
    }
    given = {name: value for name, value in variables.items() if value}
    done = subprocess.run([SCRIPT, *arguments], env=given, capture_output=True, timeout=300, check=False)
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


@pytest.mark.parametrize(
    "at_the_end",
    [{"SLURM_JOB_GPUS": "7"}, {"SLURM_JOB_GPUS": ""}, {"CUDA_VISIBLE_DEVICES": "MIG-0001"}, {"SLURMD_NODENAME": ""}],
)
def test_the_epilog_drops_the_job_whatever_it_is_told_of_its_gpus(tmp_path: Path, at_the_end: dict[str, str]) -> None:
    """A job that Slurm aborts since the Gres of its node changed ends under another GPU's number, or without any."""
    run(tmp_path)
    run(tmp_path, "epilog", **at_the_end)
    assert mapping(tmp_path) == {"1": "", "3": ""}


def test_the_epilog_drops_the_job_of_a_whole_gpu_on_a_node_that_got_a_map_of_instances_since(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mig").write_text("MIG-0001 GPU-aaaa 7\n")
    run(tmp_path, "epilog")
    assert mapping(tmp_path) == {"1": "", "3": ""}


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


@pytest.mark.parametrize("folder", ["jobs", "gpus"])
def test_nothing_that_was_planted_is_written_through(tmp_path: Path, folder: str) -> None:
    """A site opened a folder to others: links under every name that can be guessed."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / folder).mkdir()
    began = int(time.time())
    names = [f"{dot}perl.42.n7.{began + late}" for late in range(30) for dot in (".", "")]
    for name in ["1", "3", *names]:
        (tmp_path / folder / name).symlink_to(precious)
    run(tmp_path)
    assert precious.read_text() == "precious"
    assert mapping(tmp_path) | {"1": "42\n", "3": "42\n"} == mapping(tmp_path)
    assert len([path for path in (tmp_path / "gpus").iterdir() if not path.is_symlink()]) == 1


def test_a_fifo_that_was_planted_holds_no_job_up(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    os.mkfifo(tmp_path / "jobs/1")
    run(tmp_path)
    assert mapping(tmp_path) == {"1": "42\n", "3": "42\n"}


# What nvidia-smi says of GPU 0 in instances 7 and 13, GPU 1 whole, GPU 2 in instance 7 (shapes of drivers 470 to 550).
LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 1g.5gb      Device  0: (UUID: MIG-0001)
  MIG 3g.20gb     Device  1: (UUID: MIG-0002)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc)
  MIG 1g.5gb      Device  0: (UUID: MIG-0003)
"""
DEVICE = """
\t\t\t<mig_device>
\t\t\t\t<index>{0}</index>
\t\t\t\t<gpu_instance_id>{1}</gpu_instance_id>
\t\t\t\t<compute_instance_id>0</compute_instance_id>
\t\t\t</mig_device>"""
GPU = """\t<gpu id="00000000:0{0}:00.0">\n\t\t<mig_devices>{1}\n\t\t</mig_devices>
\t\t<uuid>GPU-{2}</uuid>\n\t\t<minor_number>{0}</minor_number>
\t\t<processes><process_info><gpu_instance_id>99</gpu_instance_id><pid>1</pid></process_info></processes>\n\t</gpu>\n"""
QUERIED = (
    GPU.format(0, DEVICE.format(0, 7) + DEVICE.format(1, 13), "aaaa")
    + GPU.format(1, "\n\t\t\tNone", "bbbb")
    + GPU.format(2, DEVICE.format(0, 7), "cccc")
)


def nvidia_smi(folder: Path, first: str = ":") -> dict[str, str]:
    """A stand-in that runs `first` and then says the above."""
    (folder / "listed").write_text(LISTED)
    (folder / "queried").write_text(QUERIED)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{first}\n[ $1 = -L ] && exec cat {folder}/listed\nexec cat {folder}/queried\n")
    program.chmod(0o755)
    return {"ALMANAC_NVIDIA_SMI": str(program), "ALMANAC_MIG_MAP": str(folder / "run/mig")}


def lines_of(folder: Path) -> list[str]:
    [record] = (path for path in (folder / "gpus").iterdir() if not path.name.startswith("."))
    return [line for line in record.read_text().splitlines() if line.startswith(("cuda", "mig"))]


def until(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 300
    while not claim():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_the_instances_of_a_job_come_onto_its_record_without_its_waiting_for_them(tmp_path: Path) -> None:
    smi = nvidia_smi(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0002,MIG-0003", SLURM_JOB_GPUS="1,4", **smi)
    assert lines_of(tmp_path) == ["cuda=MIG-0002,MIG-0003"]
    (tmp_path / "go").touch()
    until(lambda: len(lines_of(tmp_path)) == 3)
    assert lines_of(tmp_path)[1:] == ["mig=MIG-0002 GPU-aaaa 13", "mig=MIG-0003 GPU-cccc 7"]
    until(lambda: not (tmp_path / "run/mig.lock").exists())


def test_a_known_map_is_read_at_once_and_nvidia_smi_not_run(tmp_path: Path) -> None:
    smi = nvidia_smi(tmp_path, f"touch {tmp_path}/asked")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mig").write_text("MIG-0001 GPU-aaaa 7\nMIG-0002 GPU-aaaa 13\n")
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0002", SLURM_JOB_GPUS="1", **smi)
    assert lines_of(tmp_path) == ["cuda=MIG-0002", "mig=MIG-0002 GPU-aaaa 13"]
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("devices", ["", "0,1", "MIG-GPU-aaaa/7/0", "MIG-$(reboot)", "MIG-a\nmig=x"])
def test_nvidia_smi_is_run_for_unknown_instances_only(tmp_path: Path, devices: str) -> None:
    smi = nvidia_smi(tmp_path, f"touch {tmp_path}/asked")
    run(tmp_path, CUDA_VISIBLE_DEVICES=devices, **smi)
    assert lines_of(tmp_path) == (["cuda=MIG-GPU-aaaa/7/0"] if "/" in devices else [])
    time.sleep(0.2)
    assert not (tmp_path / "asked").exists()


def test_where_nvidia_smi_hangs_it_is_not_started_for_the_next_job(tmp_path: Path) -> None:
    smi = nvidia_smi(tmp_path, f"echo x >> {tmp_path}/asked; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    for job in ("1", "2", "3"):
        run(tmp_path, SLURM_JOB_ID=job, CUDA_VISIBLE_DEVICES="MIG-0001", **smi)
    assert len(list((tmp_path / "gpus").iterdir())) == 3
    until((tmp_path / "asked").exists)
    (tmp_path / "go").touch()
    until(lambda: not (tmp_path / "run/mig.lock").exists())
    assert (tmp_path / "asked").read_text() == "x\nx\n"  # -L and -q -x, of one run


def test_without_nvidia_smi_the_record_has_the_uuid_only(tmp_path: Path) -> None:
    where = {"ALMANAC_NVIDIA_SMI": str(tmp_path / "none"), "ALMANAC_MIG_MAP": str(tmp_path / "run/mig")}
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0001", **where)
    until(lambda: (tmp_path / "run/mig").exists() and not (tmp_path / "run/mig.lock").exists())
    assert lines_of(tmp_path) == ["cuda=MIG-0001"]


def test_on_a_node_with_mig_no_mapping_by_index_is_kept(tmp_path: Path) -> None:
    """Slurm's index 1 is an instance there, and the exporter would label GPU 1 with the job."""
    smi = nvidia_smi(tmp_path)
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0001,MIG-0002", **smi)
    until(lambda: len(lines_of(tmp_path)) == 3)
    run(tmp_path, SLURM_JOB_ID="43", CUDA_VISIBLE_DEVICES="3", SLURM_JOB_GPUS="3", **smi)
    assert not (tmp_path / "jobs").exists()


def test_the_files_of_instances_follow_a_job_where_the_map_knows_them(tmp_path: Path) -> None:
    """dcgm-exporter reads GPU.INSTANCE from 4.8.2 on. The first job waits for no map, so that no file outlives it."""
    smi = nvidia_smi(tmp_path)
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0001", **smi)
    until(lambda: len(lines_of(tmp_path)) == 2)
    assert not (tmp_path / "jobs").exists()
    run(tmp_path, SLURM_JOB_ID="43", CUDA_VISIBLE_DEVICES="MIG-0002,MIG-0003", SLURM_JOB_GPUS="1,4", **smi)
    assert mapping(tmp_path) == {"0.13": "43\n", "2.7": "43\n"}
    run(tmp_path, "epilog", SLURM_JOB_ID="43", SLURM_JOB_GPUS="", **smi)
    assert set(mapping(tmp_path).values()) <= {""}


@pytest.mark.parametrize("index", ["", "x", "1/../2", ".", "1.2"])
def test_a_map_without_the_index_of_a_gpu_makes_no_file(tmp_path: Path, index: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mig").write_text(f"MIG-0001 GPU-aaaa 7 {index}\n")
    run(tmp_path, CUDA_VISIBLE_DEVICES="MIG-0001", SLURM_JOB_GPUS="0")
    assert mapping(tmp_path) == {}
