"""Traces of each format become workloads, and records that cannot be simulated are counted by reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from almanac.errors import FileFormatError, RequestError
from simulator.cluster import NodeGroup
from simulator.traces.read import (
    COLUMNS,
    GENERATED,
    TraceOptions,
    open_trace,
    recorded_cluster,
    stored_trace,
    workload_of_jobs,
)
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

SACCT = """\
JobIDRaw|JobID|User|Account|Partition|QOS|State|Submit|Eligible|Start|End|TimelimitRaw|NNodes|NodeList|NCPUS|ReqTRES|AllocTRES|Constraints
11|11|ann|lab|gpu|normal|COMPLETED|1000|1000|1100|1400|60|1|n[1]|8|gres/gpu=2,node=1|gres/gpu=2|hbm80g
12|12|bob|lab|gpu|normal|TIMEOUT|1010|1300|1500|5105|60|2|n[1-2]|8|gres/gpu=6|gres/gpu=8|
13|13|bob|lab|gpu|normal|CANCELLED by 7|1020|1020|Unknown|1030|60|1|None assigned|8|gres/gpu=1||
14|14|bob|lab|gpu|normal|RUNNING|1030|1030|1500|Unknown|60|1|n[2]|8|gres/gpu=1|gres/gpu=1|
15|15|bob|lab|cpu|normal|COMPLETED|1040|1040|1500|1600|60|1|c1|8|cpu=8|cpu=8|
11.batch|11.batch|||||COMPLETED|1100|1100|1100|1400||1|n1|8||gres/gpu=2|
"""


def job(**values: Any) -> dict[str, Any]:
    known = {"job_id": 1, "submit_s": 0, "start_s": 5, "end_s": 15, "gpu_count": 1, "state": "COMPLETED"}
    return {name: {**known, **values}.get(name) for name in JOBS.names}


def table(*jobs: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(jobs), schema=JOBS)


def test_an_export_of_sacct_is_read_as_a_site_has_it(tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text(SACCT)
    trace = open_trace(tmp_path / "jobs.txt")
    jobs = trace.workload.jobs
    assert jobs["job_id"].tolist() == ["11", "12"]
    assert jobs["submit_s"].tolist() == [1000, 1300], "job 12 was not eligible before"
    assert jobs["run_s"].tolist() == [300, 3600], "the time limit ends a run"
    assert jobs["start_s"].tolist() == [1100, 1500]
    assert jobs["cpu_count"].tolist() == [8, 8]
    assert jobs["gpu_count"].tolist() == [2, 6], "what was asked for"
    assert jobs["is_exclusive"].tolist() == [False, True], "job 12 got whole nodes"
    assert jobs["constraint"].tolist() == ["hbm80g", ""]
    assert jobs["user"].tolist() == ["ann", "bob"]
    assert trace.workload.excluded == {"job step": 1, "never ran": 1, "still running": 1, "without a GPU": 1}
    cluster = trace.find_cluster()
    assert cluster is not None
    assert cluster.node_sets == (NodeGroup(1, 4), NodeGroup(1, 4, features=frozenset({"hbm80g"})))


def test_the_public_helios_trace(tmp_path: Path) -> None:
    (tmp_path / "cluster_log.csv").write_text(
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "7,uA,vcB,16,64,2,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:42:01,2020-06-09 19:42:01,3600,60\n"
        "8,uA,vcC,0,8,1,FAILED,2020-06-09 18:41:01,2020-06-09 18:42:01,2020-06-09 19:42:01,3600,60\n"
    )
    work = open_trace(tmp_path / "cluster_log.csv").workload
    assert work.excluded == {"without a GPU": 1}
    (job,) = work.jobs.to_dict("records")
    assert (job["submit_s"], job["start_s"], job["run_s"]) == (1_591_728_061, 1_591_728_121, 3600)
    assert (job["gpu_count"], job["node_count"], job["partition"], job["user"]) == (16, 0, "vcB", "uA")


def test_requests_win_over_allocations_and_single_nodes_are_no_limit() -> None:
    work = workload_of_jobs(
        table(
            job(job_id=1, gpu_count=8, gpu_count_req=3),
            job(
                job_id=2, gpu_count=16, gpu_count_req=0, node_count_req=1, cpu_count=9, cpu_count_req=5, array_job_id=2
            ),
            job(job_id=3, gpu_count=8, gpu_count_req=8, node_count_req=4),
            job(job_id=4, gpu_count=None, gpu_count_req=2, node_count_req=3),
        )
    )
    assert work.array("gpu_count").tolist() == [3, 16, 8, 2]
    assert work.array("node_count").tolist() == [0, 0, 4, 0]
    assert work.array("cpu_count").tolist() == [0, 5, 0, 0]
    assert work.array("is_array").tolist() == [False, True, False, False]
    assert work.array("is_exclusive").tolist() == [True, False, False, False]


def test_records_that_are_no_whole_job_are_excluded_by_name() -> None:
    work = workload_of_jobs(
        table(
            job(job_id=1, run="first"), job(job_id=1, end_s=25),
            job(job_id=2, state="REQUEUED"), job(job_id=3, state="RESIZING"),
            job(job_id=4, start_s=None, end_s=None), job(job_id=5, end_s=None), job(job_id=6, start_s=None),
            job(job_id=7, gpu_count=0), job(job_id=8, gpu_count=None),
            job(job_id=9, state="CANCELLED", start_s=9, end_s=9), job(job_id=10, state="CANCELLED"),
        ),
        {"job step": 4},
    )  # fmt: skip
    assert work.array("run_s").tolist() == [20, 10], "of repeated records, the last one counts"
    assert work.excluded == {
        "job step": 4, "repeated": 1, "requeued or resized, not a whole job": 2, "still pending": 1, "still running": 1,
        "never ran": 2, "without a GPU": 2,
    }  # fmt: skip


def test_a_trace_without_gpus_says_what_to_do() -> None:
    rows = table(job(gpu_count=None, cpu_count=16))
    with pytest.raises(RequestError, match="1 without a GPU") as error:
        workload_of_jobs(rows)
    assert "--set cpus_as_gpus=1" in error.value.hint
    assert workload_of_jobs(rows, are_cpus_gpus=True).array("gpu_count").tolist() == [16]
    with pytest.raises(RequestError, match="it is empty") as error:
        workload_of_jobs(table())
    assert "--cpus" not in error.value.hint


def test_the_cluster_is_found_from_node_lists() -> None:
    rows = table(
        job(job_id=1, node_list="n[01-03]", gpu_count=12, constraints="gpu&hbm80g", partition="a"),
        job(job_id=2, node_list="n04", gpu_count=2, gpu_type="v100", partition="b"),
        job(job_id=3, node_list="n04", gpu_count=1, gpu_type="v100", partition="a"),
        job(job_id=4, node_list="bad[[list", gpu_count=1),
        job(job_id=5, node_list="c1", gpu_count=0),
    )
    cluster = recorded_cluster(rows)
    assert cluster is not None
    assert cluster.node_sets == (
        NodeGroup(1, 2, "v100", partitions=("a", "b")),
        NodeGroup(3, 4, features=frozenset({"gpu", "hbm80g"}), partitions=("a",)),
    )
    assert recorded_cluster(table(job(), job(node_list="n1", gpu_count=0))) is None


def test_the_jobs_of_a_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store").of("one")
    store.write("jobs", table(job(job_id=1, node_list="n1"), job(job_id=2, submit_s=3)))
    trace = stored_trace(store)
    assert (trace.name, len(trace.workload)) == ("one", 2)
    cluster = trace.find_cluster()
    assert cluster is not None
    assert cluster.gpu_count == 1


def test_the_generated_site_has_the_same_jobs_for_a_seed() -> None:
    one, again, other = (open_trace(GENERATED, TraceOptions(seed=seed)) for seed in (1, 1, 2))
    assert one.workload.jobs.equals(again.workload.jobs)
    assert not one.workload.jobs.equals(other.workload.jobs)
    assert len(one.workload) > 4000
    assert set(one.workload.array("tier")) == {"", "hbm40g", "hbm80g"}
    cluster = one.find_cluster()
    assert cluster is not None
    assert cluster.gpu_count == 88


GAVEL = "ResNet-18 (batch size 16)\tpython3 x\t-step\t1\t{steps}\t{arrival}\t{gpus}\n"


def test_gavel_jobs_run_for_their_steps(tmp_path: Path) -> None:
    path, rates = tmp_path / "one.trace", tmp_path / "rates.json"
    path.write_text(
        GAVEL.format(steps=1000, arrival="5.5", gpus=1)
        + GAVEL.format(steps=10, arrival=9, gpus=7)
        + "broken\n"
        + "ResNet-18 (batch size 16)\tx\tdir\t-step\t1\t50\t2\t1\t-1\t20\n"
    )
    types = {"('ResNet-18 (batch size 16)', 1)": {"null": 4.0}, "('ResNet-18 (batch size 16)', 2)": {"null": 10.0}}
    rates.write_text(json.dumps({"p100": types, "k80": {}}))
    work = open_trace(path, TraceOptions(throughputs=rates)).workload
    assert work.array("run_s").tolist() == [250, 5]
    assert work.array("gpu_count").tolist() == [1, 2]
    assert work.array("kind").tolist() == ["ResNet-18 (batch size 16)"] * 2
    assert work.excluded == {"of an unknown type": 1, "not a line of Gavel's fields": 1}
    with pytest.raises(RequestError, match="steps, not run times"):
        open_trace(path)
    for wrong in ("[]", "{", '{"p100": {"x": 1}}', '{"t4": {}}', "[" * 100_000):
        rates.write_text(wrong)
        with pytest.raises(FileFormatError, match="throughputs"):
            open_trace(path, TraceOptions(throughputs=rates))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "neither Parquet nor CSV"),
        (b"\x00\xff\xfe not a trace", "neither Parquet nor CSV"),
        (b"a,b\n1,2\n", "fit no known jobs file"),
        (b"PAR1 broken", "cannot be read"),
        (b"\x1f\x8b broken", "cannot be read"),
    ],
)
def test_a_file_of_no_known_format_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FileFormatError, match=said):
        open_trace(tmp_path / "x")


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300)):
        with pytest.raises(FileFormatError, match="cannot be read"):
            open_trace(path)


def test_a_file_without_rows_has_no_job(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("job_id,submit_s\n")
    pq.write_table(table(), tmp_path / "x.parquet")
    for name in ("x.csv", "x.parquet"):
        with pytest.raises(RequestError):
            open_trace(tmp_path / name)


def test_the_format_is_found_by_content_and_in_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "named.parquet"
    path.write_bytes(gzip.compress(b"; Version: 2.2\n1 0 -1 5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1 -1\n"))
    assert open_trace(path).workload.array("run_s").tolist() == [5]
    path.write_bytes(gzip.compress(SACCT.encode()))
    with pytest.raises(FileFormatError):
        open_trace(path)
    (tmp_path / "jobs.csv.gz").write_bytes(path.read_bytes())
    assert len(open_trace(tmp_path / "jobs.csv.gz").workload) == 2


def test_times_may_lie_in_the_future(tmp_path: Path) -> None:
    pq.write_table(table(job(submit_s=2**33, start_s=2**33, end_s=2**33 + 9)), tmp_path / "x.parquet")
    assert open_trace(tmp_path / "x.parquet").workload.array("run_s").tolist() == [9]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "options", "jobs", "excluded"),
    [
        ("helios_jobs_15k.parquet", TraceOptions(), 10_796, 4204),
        ("mason_named_jobs_oct_nov.parquet", TraceOptions(are_cpus_gpus=True), 12_009, 1),
        ("clustercockpit_jobs.parquet", TraceOptions(), 303, 241),
    ],
)
def test_the_real_traces(
    trace: Callable[[str], Path], name: str, options: TraceOptions, jobs: int, excluded: int
) -> None:
    work = open_trace(trace(name), options).workload
    assert len(work) == jobs
    assert sum(work.excluded.values()) == excluded


@pytest.mark.data
def test_the_real_traces_of_gavel(trace: Callable[[str], Path]) -> None:
    options = TraceOptions(throughputs=trace("gavel_throughputs_k80_p100_v100.json"))
    assert len(open_trace(trace("gavel_480/seed0.trace"), options).workload) == 480
    assert len(open_trace(trace("gavel_msr/0e4a51.trace"), options).workload) == 984


def test_the_columns_are_those_of_the_store() -> None:
    assert set(COLUMNS) <= set(JOBS.names)
