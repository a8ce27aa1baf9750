"""The job of a GPU: from files that only root writes, and from cgroups; nothing else is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collector.jobs import GpuJobs

UUID = "GPU-5f3a0000-aaaa-bbbb-cccc-000000000001"
V2 = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"
V1 = "{}:{}:/slurm/uid_1000/job_{}/step_0/task_0"


class Node:
    """The files of a node. Root's are those of the user who runs the tests."""

    def __init__(self, root: Path) -> None:
        self.mapping, self.prolog, self.proc, self.cgroup = (root / name for name in ("map", "gpus", "proc", "cgroup"))
        for folder in (self.mapping, self.prolog, self.proc, self.cgroup):
            folder.mkdir()
        self.jobs = GpuJobs("n1", self.mapping, self.prolog, self.proc, self.cgroup, frozenset({os.getuid()}))

    def of(self, gpu: int = 0, uuid: str = UUID, mig: str = "") -> tuple[int, ...]:
        self.jobs.refresh()
        return self.jobs.of(gpu, uuid, mig)

    def map(self, name: str, text: str | bytes) -> Path:
        path = self.mapping / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def record(self, job: int, gpus: str, cuda: str = "", time_s: int = 100, host: str = "n1", more: str = "") -> None:
        text = f"job_id={job}\nhost={host}\ngpus={gpus}\nuid=1000\ntime={time_s}\n" + (f"cuda={cuda}\n" if cuda else "")
        (self.prolog / ".new").write_text(text + more)
        (self.prolog / ".new").rename(self.prolog / f"c.{job}.{host}.{time_s}")

    def runs(self, job: int, place: str = "system.slice/slurmstepd.scope") -> Path:
        folder = self.cgroup / place / f"job_{job}"
        folder.mkdir(parents=True)
        return folder

    def process(self, pid: int, *cgroup: str, name: str = "python", start: int = 1) -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text("".join(f"{line}\n" for line in cgroup))
        fields = ["S", *["0"] * 18, str(start), "0"]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")

    def of_processes(self, *pids: int) -> tuple[int, ...]:
        self.jobs.refresh()
        return self.jobs.of_processes(pids)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# --- dcgm-exporter's job mapping


def test_a_mapping_file_names_the_jobs_of_a_gpu_or_an_instance(node: Node) -> None:
    node.map("0", "101\n102\n")
    node.map("1.7", "103\n")
    assert node.of(0) == (101, 102)
    assert node.of(1, mig="7") == (103,) and node.of(1) == () and node.of(1, mig="9") == ()
    node.map("0", "")
    assert node.of(0) == (), "the epilog has taken the job out"


@pytest.mark.parametrize(
    "text",
    ["-5", "1e9", "0", "007", "99999999999", "12 x", "\x1b[31m5", "५", b"\xff5", "5\x005", "1 " * 65, "7" * 5000, "a"],
)
def test_a_mapping_file_with_anything_but_job_ids_names_none(node: Node, text: str | bytes) -> None:
    node.map("0", text)
    assert node.of(0) == ()


def test_files_that_others_can_write_or_that_are_no_files_are_not_believed(node: Node) -> None:
    node.map("0", "5").chmod(0o666)
    (node.mapping / "1").symlink_to(node.map("77", "6"))
    os.mkfifo(node.mapping / "2")
    (node.mapping / "3").mkdir()
    os.link(node.map("4", "7"), node.mapping / "5")
    assert [node.of(gpu) for gpu in range(6)] == [()] * 6
    node.jobs.owners = frozenset({os.getuid() + 1})
    node.map("0", "5").chmod(0o644)
    assert node.of(0) == (), "another user's file"


def test_a_folder_that_others_can_write_to_is_not_read(node: Node) -> None:
    node.map("0", "5")
    assert node.of(0) == (5,)
    for mode in (0o777, 0o1777, 0o775):
        node.mapping.chmod(mode)
        assert node.of(0) == ()
    node.mapping.chmod(0o755)
    node.mapping.rename(node.mapping.with_name("moved"))
    node.mapping.symlink_to(node.mapping.with_name("moved"))
    assert node.of(0) == ()


# --- records of the prolog


def test_a_record_counts_while_its_job_has_a_cgroup(node: Node) -> None:
    node.record(42, "0-1")
    assert node.of(0) == (), "the job has ended, or never was on this node"
    folder = node.runs(42)
    assert node.of(0) == (42,) and node.of(1) == (42,) and node.of(2) == ()
    assert node.of(0, mig="7") == (), "Slurm's index is not the GPU's under MIG"
    folder.rmdir()
    assert node.of(0) == ()


def test_a_record_with_uuids_counts_by_uuid(node: Node) -> None:
    mig = "MIG-11111111-2222"
    node.record(42, "0,1", f"{UUID},{mig}", more=f"mig={mig} GPU-2 9\n")
    node.runs(42, "memory/slurm/uid_1000")
    assert node.of(5) == (42,) and node.of(0, "GPU-9") == ()
    assert node.of(0, "GPU-2", "9") == (42,) and node.of(0, "GPU-2", "7") == ()


def test_jobs_that_share_a_gpu_are_all_named(node: Node) -> None:
    for job in (42, 43):
        node.record(job, "0")
        node.runs(job, "system.slice/n1_slurmstepd.scope")
    assert node.of(0) == (42, 43)


def test_the_newest_record_of_a_job_counts_and_those_of_other_nodes_do_not(node: Node) -> None:
    node.record(42, "0", time_s=100)
    node.record(42, "1", time_s=200)
    node.record(42, "2", time_s=300, host="n2")
    node.runs(42)
    assert [node.of(gpu) for gpu in range(3)] == [(), (42,), ()]


def test_a_record_that_is_written_again_is_read_again(node: Node) -> None:
    node.runs(42)
    node.record(42, "0", cuda="MIG-1-2")
    assert node.of(0, "GPU-2", "9") == ()
    node.record(42, "0", cuda="MIG-1-2", more="mig=MIG-1-2 GPU-2 9\n")
    assert node.of(0, "GPU-2", "9") == (42,)


@pytest.mark.parametrize("place", ["user.slice/slurmstepd.scope", "slurmstepd.scope", "memory/mine/uid_1000"])
def test_a_cgroup_in_another_place_is_no_job(node: Node, place: str) -> None:
    node.record(42, "0")
    node.runs(42, place)
    assert node.of(0) == ()


@given(st.binary(max_size=300))
def test_no_record_breaks_the_sample(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    node.runs(42)
    (node.prolog / "c.42.n1.100").write_bytes(content)
    (node.prolog / os.fsdecode(b"c.42.\xff.100")).write_bytes(content)
    assert node.of(0) in ((), (42,))


# --- processes


@pytest.mark.parametrize(
    "lines",
    [(V2.format(42),), ("0::/system.slice/n1_slurmstepd.scope/job_42/step_batch/user/task_0",),
     (V1.format(9, "memory", 42), V1.format(4, "cpu,cpuacct", 42), "1:name=systemd:/system.slice/slurmd.service"),
     ("8:freezer:/slurm_n1/uid_1000/job_42/step_0",), ("0::/system.slice/slurmstepd.scope/job_42",)],
)  # fmt: skip
def test_a_process_belongs_to_the_job_of_its_cgroup(node: Node, lines: tuple[str, ...]) -> None:
    node.process(7, *lines, name="a) R 0 0 (b")
    assert node.of_processes(7) == (42,)


@pytest.mark.parametrize(
    "lines",
    [("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_42/step_0",),
     ("0::/user.slice/user-1000.slice/slurm/uid_1000/job_42",), ("0::/../../slurmstepd.scope/job_42/step_0",),
     ("1:name=systemd:/slurm/uid_1000/job_42",), ("3:memory:/user/slurm/uid_1000/job_42",),
     ("0::/system.slice/slurmstepd.scope/job_42x/step_0",), ("0::/system.slice/slurmstepd.scope/job_0/step_0",),
     (V1.format(9, "memory", 42), V1.format(4, "devices", 43)), (), ("nonsense", "0::", "::"),
     ("0::/system.slice/ssh.service",)],
)  # fmt: skip
def test_a_process_elsewhere_belongs_to_no_job(node: Node, lines: tuple[str, ...]) -> None:
    """A user owns cgroups below user@UID.service, and may name them as they like."""
    node.process(7, *lines)
    assert node.of_processes(7) == ()


def test_a_process_that_took_the_id_after_the_sample_began_is_not_believed(node: Node) -> None:
    node.process(7, V2.format(42), start=2**40)
    assert node.of_processes(7, 8, 0, -1) == ()


def test_several_jobs_of_processes_are_all_named(node: Node) -> None:
    node.process(7, V2.format(43))
    node.process(8, V2.format(42))
    node.process(9, V2.format(42))
    assert node.of_processes(7, 8, 9) == (42, 43)
