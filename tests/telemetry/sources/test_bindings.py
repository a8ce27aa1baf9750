"""GPU bindings from prolog records and squeue, and requests that squeue and sacct record alike."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Slurm, Tier
from almanac.errors import CommandError, SourceError
from almanac.names import name_key
from almanac.records import Counts
from almanac.tiers import requested_tier
from slurm.nodes import with_defaults
from slurm.sbatch import parse_submission
from telemetry.sources.hook_records import PrologSource, SqueueSource, arrival_s
from telemetry.sources.sacct import SacctSource
from telemetry.store.schema import BINDINGS
from telemetry.store.store import Store

FIXTURES = Path(__file__).parents[2] / "slurm/fixtures"
NOW_S = 1_800_000_000
NAME = f"lab.7.n1.{NOW_S - 60}"
Rows = set[tuple[Any, ...]]


def record(folder: Path, job_id: int = 7, host: str = "n1", time_s: int = NOW_S - 60, **changes: str) -> Path:
    value = {"job_id": str(job_id), "host": host, "gpus": "0-1,3", "uid": "1000", "time": str(time_s), **changes}
    path = folder / f"lab.{job_id}.{host}.{time_s}"
    path.write_text("".join(f"{key}={text}\n" for key, text in value.items()))
    path.chmod(0o644)
    return path


def read(folder: Path, since_s: int = NOW_S - 3600, arrived_s: float = 0.0, owner: int = 0) -> tuple[Rows, Counts]:
    source = PrologSource(folder, "lab", frozenset({owner or os.getuid()}), arrival=lambda path: arrived_s)
    counts, rows = Counts(), set()
    for batch in source.read(since_s, NOW_S):
        assert batch.table == "bindings" and batch.rows.schema == BINDINGS
        counts.add(batch.counts)
        rows |= {tuple(row.values()) for row in batch.rows.to_pylist()}
    assert batch.watermark_s == NOW_S
    assert counts.seen == counts.kept + counts.dropped.total()
    return rows, counts


def test_a_record_gives_a_row_for_each_gpu(tmp_path: Path) -> None:
    record(tmp_path)
    record(tmp_path, 8, "gpu-a.cluster.example", gpus="2")
    rows, counts = read(tmp_path)
    assert rows == {
        *((7, "n1", gpu, "prolog", NOW_S - 60, None, None) for gpu in (0, 1, 3)),
        (8, "gpu-a.cluster.example", 2, "prolog", NOW_S - 60, None, None),
    }
    assert counts.kept == 2


def test_mig_instances_are_named_by_uuid_and_once_mapped_by_gpu_and_instance(tmp_path: Path) -> None:
    """Slurm's indices 4 and 5 are instances; the map was there for the first only. Drivers before 470 name both."""
    path = record(tmp_path, gpus="4,5", cuda="MIG-aa-1,MIG-bb-2")
    with path.open("a") as handle:
        handle.write("mig=MIG-aa-1 GPU-x 7\nmig=MIG-cc-3 GPU-x 8\nmig=nonsense\n")
    record(tmp_path, 8, gpus="6", cuda="MIG-GPU-5d5b-d33d/11/0")
    record(tmp_path, 9, gpus="0,1", cuda="0,1")
    record(tmp_path, 10, gpus="0,1", cuda="GPU-x,1")
    when = NOW_S - 60
    assert read(tmp_path)[0] == {
        (7, "n1", 4, "prolog", when, "GPU-x", "7"),
        (7, "n1", 5, "prolog", when, "MIG-bb-2", None),
        (8, "n1", 6, "prolog", when, "GPU-5d5b-d33d", "11"),
        (9, "n1", 0, "prolog", when, None, None),
        (9, "n1", 1, "prolog", when, None, None),
        (10, "n1", 0, "prolog", when, "GPU-x", None),
        (10, "n1", 1, "prolog", when, None, None),
    }


def test_a_record_written_anew_with_its_instances_completes_the_row(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    folder = tmp_path / "gpus"
    folder.mkdir()
    source = PrologSource(folder, "lab", frozenset({os.getuid()}))
    path = record(folder, gpus="4", cuda="MIG-a")
    for line in ("", "mig=MIG-a GPU-x 7\n"):
        with path.open("a") as handle:
            handle.write(line)
        for batch in source.read(NOW_S - 3600, NOW_S):
            store.of("lab").write("bindings", batch.rows)
    [row] = store.of("lab").read("bindings").to_pylist()
    assert (row["gpu"], row["uuid"], row["mig"]) == (4, "GPU-x", "7")


def test_an_empty_folder_gives_an_empty_table(tmp_path: Path) -> None:
    assert read(tmp_path) == (set(), Counts())


def test_records_of_other_times_and_clusters_and_unfinished_ones_are_not_looked_at(tmp_path: Path) -> None:
    record(tmp_path, 1, time_s=NOW_S - 2 * 86400)
    record(tmp_path, 2, time_s=NOW_S)
    record(tmp_path, 3).rename(tmp_path / f"other.3.n1.{NOW_S - 60}")
    record(tmp_path, 4).rename(tmp_path / f".lab.4.n1.{NOW_S - 60}")
    assert read(tmp_path) == (set(), Counts())


def test_a_record_of_the_hour_before_is_read_again(tmp_path: Path) -> None:
    record(tmp_path, time_s=NOW_S - 3600)
    assert len(read(tmp_path, since_s=NOW_S - 10)[0]) == 3


def test_a_record_that_comes_days_late_is_read_when_it_comes(tmp_path: Path) -> None:
    record(tmp_path, time_s=NOW_S - 3 * 86400)
    assert read(tmp_path, since_s=NOW_S - 600, arrived_s=NOW_S - 300)[0] == {
        (7, "n1", gpu, "prolog", NOW_S - 3 * 86400, None, None) for gpu in (0, 1, 3)
    }
    assert read(tmp_path, since_s=NOW_S - 600, arrived_s=NOW_S - 2 * 86400)[0] == set()


def test_a_copy_that_keeps_the_times_of_the_original_arrives_now(tmp_path: Path) -> None:
    path = record(tmp_path)
    os.utime(path, (1, 1))
    assert arrival_s(path) == pytest.approx(time.time(), abs=600)
    path.unlink()
    assert arrival_s(path) == 0.0


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda folder: (folder / NAME).symlink_to(record(folder).rename(folder / ".target")),
      "cannot be opened, or a link"),
     (lambda folder: os.mkfifo(folder / NAME), "not a regular file"),
     (lambda folder: (folder / NAME).mkdir(), "not a regular file"),
     (lambda folder: record(folder, more="y" * 4096), "too large"),
     (lambda folder: record(folder).chmod(0o666), "not root's own file"),
     (lambda folder: record(folder).rename(folder / "notes.txt"), "file name of another form"),
     (lambda folder: record(folder, job_id=7, gpus="0-99999"), "unreadable GPU indices"),
     (lambda folder: record(folder, gpus="all"), "unreadable GPU indices"),
     (lambda folder: record(folder, gpus=""), "no GPU indices"),
     (lambda folder: record(folder, cuda="MIG-a"), "numbers of GPU indices and UUIDs differ"),
     (lambda folder: record(folder, cuda="MIG-a,MIG-b,../x"), "unreadable GPU UUID"),
     (lambda folder: record(folder, time="1"), "content and file name differ"),
     (lambda folder: record(folder).write_text(""), "content and file name differ"),
     (lambda folder: record(folder).write_bytes(b"\xff\x00=\n"), "content and file name differ"),
     (lambda folder: record(folder, host="n1;x"), "not a host name")],
)  # fmt: skip
def test_what_is_no_record_of_root_is_counted(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path)
    record(tmp_path, 8)
    rows, counts = read(tmp_path)
    assert {row[0] for row in rows} == {8}
    assert dict(counts.dropped) == {reason: 1}


def test_a_folder_that_is_not_there_is_said_and_files_of_another_owner_are_not_believed(tmp_path: Path) -> None:
    record(tmp_path)
    assert dict(read(tmp_path, owner=os.getuid() + 1)[1].dropped) == {"not root's own file": 1}
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        read(tmp_path / "none")


def squeue(content: Any, **given: Any) -> tuple[Rows, Counts]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()

    def runner(argv: Sequence[str]) -> bytes:
        assert list(argv) == ["squeue", "-a", "-t", "RUNNING", "--json"]
        return data

    [batch] = SqueueSource(runner, lambda: NOW_S, **given).read(0, NOW_S)
    assert batch.table == "bindings" and batch.rows.schema == BINDINGS and batch.watermark_s is None
    assert batch.counts.seen == batch.counts.kept + batch.counts.dropped.total()
    return {tuple(row.values()) for row in batch.rows.to_pylist()}, batch.counts


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_recorded_jobs_that_run(release: str) -> None:
    rows, counts = squeue((FIXTURES / release / "squeue.json").read_bytes())
    cases = (line.split("\t") for line in (FIXTURES / release / "cases.tsv").read_text().splitlines())
    job_ids = {name: int(job_id) for name, job_id in cases if job_id}
    assert {row[1:3] for row in rows if row[0] == job_ids["running"]} == {("n1", 1), ("n1", 2), ("n2", 0), ("n2", 1)}
    assert {row[1:3] for row in rows if row[0] == job_ids["running_het"]} == {("n1", 3)}
    assert {row[1:3] for row in rows if row[0] == job_ids["running_het"] + 1} == {("n2", 2)}
    # The task of the array that runs: its own job id, not the array's.
    assert {row[1:3] for row in rows if row[0] > job_ids["pending"]} == {("n1", 0)}
    assert (counts.seen, counts.kept, len(rows)) == (4, 4, 7)
    assert len({row[1:3] for row in rows}) == 7
    now_s = int((FIXTURES / release / "now_s.txt").read_text())
    assert all(now_s - 60 < row[4] <= now_s for row in rows)


def job(**changes: Any) -> dict[str, Any]:
    return {
        "job_id": 7, "cluster": "lab", "job_state": ["RUNNING"], "nodes": "n1", "start_time": NOW_S - 50,
        "gres_detail": ["gpu:a100:2(IDX:0,3)"], "name": "x", "submit_time": 5, **changes,
    }  # fmt: skip


def test_polling_again_gives_the_same_rows() -> None:
    expected = {(7, "n1", gpu, "squeue", NOW_S - 50, None, None) for gpu in (0, 3)}
    assert squeue({"jobs": [job()]})[0] == squeue({"jobs": [job(), job()]})[0] == expected


@pytest.mark.parametrize(
    "other",
    [
        job(job_state=["PENDING"]), job(job_state="PENDING"), job(gres_detail=[]),
        job(gres_detail=["nvme:1"]), job(gres_detail=None), job(cluster="other"), "x", None,
    ],
)  # fmt: skip
def test_other_jobs_are_not_looked_at(other: Any) -> None:
    assert squeue({"jobs": [other]}, cluster="lab") == (set(), Counts())


def test_hosts_are_in_the_order_of_the_node_table() -> None:
    detail = ["gpu:1(IDX:5)", "gpu:1(IDX:6)"]
    later = {"nodes": {"allocation": [{"name": "z1"}, {"name": "a1"}]}}
    earlier = {"nodes": "a1,z1", "allocated_nodes": [{"nodename": "z1"}, {"nodename": "a1"}]}
    for resources in (later, earlier):
        rows, _ = squeue({"jobs": [job(nodes="a1,z1", gres_detail=detail, job_resources=resources)]})
        assert {row[1:3] for row in rows} == {("z1", 5), ("a1", 6)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"job_id": "7"}, "job that cannot be read"), ({"job_id": 10**400}, "job that cannot be read"),
     ({"job_state": 1}, "job that cannot be read"), ({"job_state": None}, "job that cannot be read"),
     ({"job_resources": {"allocated_nodes": [{"nodename": "\ud800"}]}}, "not a host name"),
     ({"nodes": "n1", "gres_detail": ["gpu:1(IDX:0)"] * 2}, "nodes and gres_detail differ in number"),
     ({"nodes": "n[1-2]", "gres_detail": ["gpu:1(IDX:0)"] * 2}, "order of the nodes unknown"),
     ({"nodes": "n[1-999999999]"}, "job that cannot be read"), ({"nodes": "@all"}, "job that cannot be read"),
     ({"gres_detail": ["gpu:1(IDX:0-99999)"]}, "unreadable GPU indices"),
     ({"nodes": None}, "nodes and gres_detail differ in number")],
)  # fmt: skip
def test_a_job_that_cannot_be_read_is_counted(changes: dict[str, Any], reason: str) -> None:
    rows, counts = squeue({"jobs": [job(**changes), job(job_id=8)]})
    assert {row[0] for row in rows} == {8}
    assert dict(counts.dropped) == {reason: 1}


@pytest.mark.parametrize("start", [None, 0, -5, NOW_S + 5, {"set": False, "number": 0}])
def test_without_a_start_in_the_past_the_time_of_the_poll_is_taken(start: Any) -> None:
    assert {row[4] for row in squeue({"jobs": [job(start_time=start)]})[0]} == {NOW_S}


@pytest.mark.parametrize("data", [b"", b"no JSON", b"{}", b"[]", b"[" * 100_000])
def test_an_answer_without_jobs_is_no_idle_cluster(data: bytes) -> None:
    with pytest.raises(CommandError, match="no list of jobs"):
        squeue(data)


RELEASES = ("22.05.8", "24.11.5", "26.05.5")
NOTE = re.compile(r'^note (?P<case>\w+) "\$\(sub (?P<options>-[^"]*) --wrap .*\)"$', re.M)
SUBMITTED = {
    match["case"]: shlex.split(match["options"]) for match in NOTE.finditer((FIXTURES / "record.sh").read_text())
}
TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))
PARTITIONS = b"PartitionName=all Default=YES DefaultTime=01:00:00 MaxTime=2-00:00:00\n"


def rows_of(release: str) -> dict[int, dict[str, Any]]:
    """By job id, the last run of each, as ingest stores it."""
    folder = FIXTURES / release
    now_s = int((folder / "now_s.txt").read_text())

    def answer(argv: Sequence[str]) -> bytes:
        if argv[0] == "sacctmgr":
            return b"lab\n"
        name = "helpformat.txt" if "--helpformat" in argv else "sacct.json" if "--json" in argv else "sacct.txt"
        return (folder / name).read_bytes()

    config = Slurm(overlap_hours=0, read_steps=False)
    source = SacctSource(answer, "lab", TIERS, config, lambda: now_s, delimiter=lambda: "|~0123456789abcdef~|")
    return {row["job_id"]: row for batch in source.read(now_s - 3600, now_s) for row in batch.rows.to_pylist()}


def defaults(argv: Sequence[str]) -> bytes:
    """Output of scontrol and sacctmgr on the cluster of the recordings."""
    return PARTITIONS if argv[0] == "scontrol" else b"ml|ml|\n"


@pytest.mark.parametrize("release", RELEASES)
def test_a_request_and_its_record_say_the_same(release: str) -> None:
    cases = dict(line.split("\t") for line in (FIXTURES / release / "cases.tsv").read_text().splitlines())
    rows, differences, compared = rows_of(release), {}, 0
    for case, options in SUBMITTED.items():
        row = rows.get(int(cases.get(case) or 0))
        if row is None:
            continue
        submission = parse_submission([*options, "--wrap", "true"], {}, str)
        request = with_defaults(submission.request("alice", 0), submission.options, TIERS, "lab", defaults)
        tier = requested_tier(request, TIERS)
        asked = {
            "name_key": name_key(request.job_name), "account": request.account, "partition": request.partition,
            "qos": request.qos, "tier": tier.name if tier else None, "time_limit_s": request.time_limit_s,
            "gpu_count_req": request.gpu_count, "gpu_type_req": request.gpu_type, "is_array": request.is_array,
            "node_count_req": request.node_count, "cpu_count_req": request.cpu_count,
        }  # fmt: skip
        row["is_array"] = row["array_job_id"] is not None
        compared += 1
        if wrong := {key: (value, row[key]) for key, value in asked.items() if value != row[key]}:
            differences[case] = wrong
    assert compared >= 15
    # Slurm raises the CPUs of --gpus-per-socket to the sockets.
    assert differences == {"per_socket": {"cpu_count_req": (1, 2)}}
