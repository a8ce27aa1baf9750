"""Job steps, and the CPU time and host memory that they used, against recorded outputs (fixtures/README.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Config, Slurm
from almanac.errors import CommandError
from almanac.records import Counts
from almanac.tres import size_mib
from slurm.accounting import STEP_COLUMNS, parse_steps
from slurm.step_use import JOB_COLUMNS, USAGE_COLUMNS, job_use, parse_cpu_time
from telemetry.ingest import configured_spans
from telemetry.site import Site
from telemetry.sources.sacct import SacctSource
from telemetry.sources.source import RowBatch
from telemetry.store.forgotten import Forgetting, Forgotten, write_forgotten
from telemetry.store.schema import STEPS
from telemetry.store.store import Store

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = ["22.05.8", "24.11.5", "26.05.5"]
DELIMITER = "|~0123456789abcdef~|"
LATEST_S = 2_000_000_000


class Recorded:
    """The steps of one release: the text, the cases' job ids, and the runs of each job by submit time."""

    def __init__(self, release: str) -> None:
        # Recorded where accounting gathered nothing of CPUs and memory.
        recorded = (FIXTURES / release / "steps.txt").read_text().splitlines()
        self.text = "".join(line + DELIMITER * len(USAGE_COLUMNS) + "\n" for line in recorded).encode()
        cases = (FIXTURES / release / "steps_cases.tsv").read_text().splitlines()
        self.cases = {name: int(job_id) for name, job_id in (line.split("\t") for line in cases)}
        lines = [line.split(DELIMITER) for line in self.text.decode().splitlines()]
        self.runs = {(int(line[1]), int(line[3])) for line in lines if "." not in line[1]}

    def steps(self, case: str) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row["job_id"] == self.cases[case]]

    def rows(self, counts: Counts | None = None) -> list[dict[str, Any]]:
        rows, uses = parse_steps(self.text, DELIMITER, "lab", LATEST_S, self.runs, counts or Counts())
        assert {value for steps in uses.values() for value in job_use(steps).values()} == {None}
        return rows


@pytest.fixture(params=RELEASES)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_every_step_of_srun_becomes_a_row_and_no_other_line(recorded: Recorded) -> None:
    counts = Counts()
    rows = recorded.rows(counts)
    ids = [line.split(DELIMITER)[1] for line in recorded.text.decode().splitlines()]
    real = sorted(job_id for job_id in ids if "." in job_id and not job_id.endswith((".batch", ".extern")))
    assert sorted(f"{row['job_id']}.{row['step']}" for row in rows) == real
    assert (counts.seen, counts.kept, counts.dropped) == (len(real), len(real), {})


def test_steps_of_one_node(recorded: Recorded) -> None:
    """Two in a row, two at once, one GPU, none, a failed one, both halves of a heterogeneous one, a killed one."""
    steps = recorded.steps("first")
    assert [row["step"] for row in steps] == ["0", "1", "2", "3", "4", "5", "6", "7+0", "8"]
    assert [row["gpu_count"] for row in steps] == [4, 4, 2, 2, 1, 0, 4, 2, 4]
    assert {row["node_list"] for row in steps} == {"n1"} and {row["node_count"] for row in steps} == {1}
    assert [row["state"] for row in steps][5:] == ["COMPLETED", "FAILED", "COMPLETED", "CANCELLED"]
    assert [(row["exit_code"], row["exit_signal"]) for row in steps][6:] == [(3, 0), (0, 0), (0, 9)]
    assert steps[0]["end_s"] <= steps[1]["start_s"] and steps[1]["end_s"] <= steps[2]["start_s"] + 1
    assert steps[2]["start_s"] < steps[3]["end_s"] and steps[3]["start_s"] < steps[2]["end_s"]


def test_each_step_says_which_of_the_jobs_nodes_it_had(recorded: Recorded) -> None:
    steps = recorded.steps("two_nodes")
    assert [(row["step"], row["node_list"], row["gpu_count"]) for row in steps[:1]] == [("0", "n[2-3]", 4)]
    assert {(row["node_list"], row["gpu_count"]) for row in steps[1:]} == {("n2", 2), ("n3", 2)}


def test_a_step_across_a_heterogeneous_job_is_a_step_of_each_part(recorded: Recorded) -> None:
    first = recorded.cases["het"]
    parts = [
        (row["job_id"], row["step"], row["node_list"]) for row in recorded.rows() if row["job_id"] - first in (0, 1)
    ]
    assert parts == [(first, "0", "n2"), (first + 1, "0", "n3")]


def test_each_run_of_a_requeued_job_has_its_own_steps(recorded: Recorded) -> None:
    steps = recorded.steps("requeued")
    assert [row["step"] for row in steps] == ["0", "1", "0", "1"]
    first, second = steps[0]["submit_s"], steps[2]["submit_s"]
    assert first < second and [row["submit_s"] for row in steps] == [first, first, second, second]
    assert all(row["start_s"] >= row["submit_s"] for row in steps)


def test_a_job_without_srun_has_no_steps(recorded: Recorded) -> None:
    assert recorded.steps("batch_only") == []


def test_only_the_runs_that_were_asked_for_are_given(recorded: Recorded) -> None:
    later = max(run for run in recorded.runs if run[0] == recorded.cases["requeued"])
    counts = Counts()
    rows, uses = parse_steps(recorded.text, DELIMITER, "lab", LATEST_S, {later}, counts)
    assert set(uses) == {later}
    assert {(row["job_id"], row["submit_s"]) for row in rows} == {later}
    assert counts.seen == counts.kept == 2


JOB = {"Cluster": "lab", "JobIDRaw": "7", "State": "COMPLETED", "Submit": "100", "Start": "110", "End": "200",
       "NNodes": "1", "NodeList": "n1", "AllocTRES": "gres/gpu=4,node=1", "ExitCode": "0:0", "NTasks": "",
       "TotalCPU": "00:00:00", "MaxRSS": "", "TRESUsageInMax": ""}  # fmt: skip


def line(**changes: str) -> str:
    return DELIMITER.join({**JOB, **changes}[name] for name in STEP_COLUMNS)


def parse(*lines: str) -> tuple[list[dict[str, Any]], Counts]:
    counts = Counts()
    rows, _ = parse_steps("\n".join(lines).encode(), DELIMITER, "lab", LATEST_S, {(7, 100)}, counts)
    assert counts.seen == counts.kept + counts.dropped.total()
    return rows, counts


def test_what_is_not_recorded_is_null() -> None:
    unset = {"AllocTRES": "", "NNodes": "", "NodeList": "None assigned", "Start": "Unknown", "End": "Unknown"}
    [row], _ = parse(line(), line(JobIDRaw="7.0", State="CANCELLED by 1000", ExitCode="", **unset))
    expected = {"job_id": 7, "submit_s": 100, "step": "0", "state": "CANCELLED"}
    assert row == dict.fromkeys(STEPS.names) | expected


def test_the_whole_job_steps_are_passed_over() -> None:
    others = [line(JobIDRaw=f"7.{name}") for name in ("batch", "extern", "interactive", "batch+0")]
    assert parse(line(), *others) == ([], Counts())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"JobIDRaw": "7.TBD"}, "step id of another form"), ({"JobIDRaw": "7.shell"}, "step id of another form"),
     ({"JobIDRaw": "8.0"}, "step without its job"), ({"Cluster": "other"}, "job of another cluster"),
     ({"State": "?"}, "unreadable state"), ({"Start": "yesterday"}, "unreadable time"),
     ({"End": "2000000001"}, "in the future"), ({"End": "109"}, "ends before it starts"),
     ({"NodeList": f"n1{DELIMITER}n2"}, "wrong number of fields")],
)  # fmt: skip
def test_a_malformed_step_is_counted_and_a_good_one_before_it_is_kept(changes: dict[str, str], reason: str) -> None:
    rows, counts = parse(line(), line(JobIDRaw="7.0"), line(**{"JobIDRaw": "7.1", **changes}))
    assert [row["step"] for row in rows] == ["0"]
    assert dict(counts.dropped) == {reason: 1}


def test_steps_behind_an_unreadable_line_are_given_to_no_run() -> None:
    """It may have been the line of the job's next run."""
    rows, counts = parse(line(), "7", line(JobIDRaw="7.0"))
    assert rows == [] and dict(counts.dropped) == {"wrong number of fields": 1, "step without its job": 1}
    rows, counts = parse(line(Submit="soon"), line(JobIDRaw="7.0"))
    assert rows == [] and dict(counts.dropped) == {"step without its job": 1}


def test_a_step_given_twice_counts_once() -> None:
    rows, counts = parse(line(), line(JobIDRaw="7.0"), line(JobIDRaw="7.0", State="FAILED"))
    assert [row["state"] for row in rows] == ["FAILED"]
    assert dict(counts.dropped) == {"repeated record of a step": 1}


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="|"), max_size=200))
def test_no_text_without_the_delimiter_makes_a_step(text: str) -> None:
    """The delimiter is drawn for each query: what was written before cannot hold it."""
    rows, _ = parse(line(), *text.split("\n"))
    assert rows == []


@dataclass
class Accounting:
    """sacct of jobs 1..count, each with two steps; every third has no GPU, every fifth has not ended."""

    count: int
    fails: bool = False
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> bytes:
        if "--helpformat" in argv or argv[0] == "sacctmgr":
            return b"lab\n"
        if "--json" in argv:
            return b'{"jobs": []}'
        if argv[0] == "sinfo":
            raise CommandError("Unable to contact slurm controller")
        columns = argv[argv.index("-o") + 1].split(",")
        if "-X" not in argv:
            self.asked.append(list(argv))
            if self.fails:
                raise CommandError("sacct: error: slurmdbd: Connection refused")
            ids = map(int, argv[argv.index("-j") + 1].split(","))
            return "".join(self.line(columns, job, step) for job in ids for step in ("", ".batch", ".0", ".1")).encode()
        return "".join(self.line(columns, job, "") for job in range(1, self.count + 1)).encode()

    def line(self, columns: list[str], job: int, step: str) -> str:
        value = {**JOB, "JobIDRaw": f"{job}{step}", "JobID": f"{job}{step}", "User": "alice", "ElapsedRaw": "90",
                 "End": "Unknown" if job % 5 == 0 else "200", "ReqTRES": "",
                 "AllocTRES": "node=1" if job % 3 == 0 else "gres/gpu=1"}  # fmt: skip
        return DELIMITER.join(value.get(name, "") for name in columns) + "\n"


def read(runner: Accounting, **config: Any) -> list[RowBatch]:
    source = SacctSource(
        runner, "lab", (), Slurm(overlap_hours=1, **config), lambda: LATEST_S, delimiter=lambda: DELIMITER
    )
    return list(source.read(1000, 2000))


def test_steps_of_ended_jobs_are_asked_for_by_parts_and_come_before_their_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("telemetry.sources.sacct.IDS_PER_QUERY", 4)
    runner = Accounting(15)
    batches = read(runner)
    assert [(batch.table, batch.watermark_s) for batch in batches] == [*[("steps", None)] * 3, ("jobs", 2000)]
    wanted = [1, 2, 4, 7, 8, 11, 13, 14]
    assert [query[query.index("-j") + 1] for query in runner.asked] == ["1,2,3,4", "6,7,8,9", "11,12,13,14"]
    assert all(batch.counts.kept == batch.rows.num_rows for batch in batches)
    rows = [row for batch in batches[:3] for row in batch.rows.to_pylist()]
    assert [(row["job_id"], row["step"]) for row in rows] == [
        *((job, step) for job in (1, 2, 4, 7) for step in "01"),
        *((job, step) for job in (8, 11, 13, 14) for step in "01"),
    ]
    assert sorted({row["job_id"] for row in rows}) == wanted
    assert batches[0].rows.schema == STEPS


def test_the_query_asks_for_no_field_that_a_user_writes() -> None:
    runner = Accounting(1)
    read(runner)
    [query] = runner.asked
    assert query[query.index("-o") + 1].split(",") == list(STEP_COLUMNS)
    assert not {"JobName", "Comment", "AdminComment", "SubmitLine", "WorkDir"} & set(STEP_COLUMNS)
    assert "-D" in query and query[query.index("-M") + 1] == "lab"


def test_steps_can_be_left_out() -> None:
    runner = Accounting(15)
    assert [batch.table for batch in read(runner, read_steps=False)] == ["jobs"]
    assert runner.asked == []


def test_steps_of_forgotten_users_are_not_asked_for(tmp_path: Path) -> None:
    """With the source that a configuration gives: only jobs from before count as forgotten."""
    store = Store.create(tmp_path)
    began_s = read(Accounting(1))[1].rows["submit_s"][0].as_py()
    for before_s, tables in ((began_s, ["steps", "jobs"]), (began_s + 1, ["jobs"])):
        write_forgotten(store.root, Forgotten().with_person("alice", Forgetting(before_s)))
        site = Site.of(store.of("lab"), Config(), LATEST_S).but(commands=Accounting(1))
        (span,) = configured_spans(site, ["sacct"])
        assert isinstance(span.source, SacctSource)
        source = dataclasses.replace(span.source, delimiter=lambda: DELIMITER)
        assert [batch.table for batch in source.read(1000, 2000)] == tables


def test_jobs_are_kept_where_their_steps_cannot_be_read() -> None:
    steps, jobs = read(Accounting(2, fails=True))
    assert (steps.rows.num_rows, jobs.rows.num_rows) == (0, 2)
    assert dict(steps.counts.notes) == {"jobs without their steps: sacct failed": 2}


# Recorded on 22.05.8 with jobacct_gather/linux: a batch step that starts 2 tasks, then two steps one after the other.
RECORDED = """\
lab|2|COMPLETED|100|1795448165|1795448185|1|n1|gres/gpu=1,mem=2000M|0:0||00:05.274||
lab|2.batch|COMPLETED|100|1795448165|1795448185|1|n1|gres/gpu=1,mem=2000M|0:0|1|00:00.039|17076K|
lab|2.0|COMPLETED|100|1795448165|1795448173|1|n1|gres/gpu=1,mem=2000M|0:0|2|00:02.550|110620K|
lab|2.1|COMPLETED|100|1795448173|1795448179|1|n1|gres/gpu=1,mem=500M|0:0|1|00:01.132|162048K|
lab|2.2|COMPLETED|100|1795448179|1795448185|1|n1|gres/gpu=1,mem=500M|0:0|1|00:01.552|315548K|
"""
UNKNOWN = dict.fromkeys(JOB_COLUMNS)


def use(text: str) -> dict[str, float | None]:
    _, uses = parse_steps(text.encode(), "|", "lab", 2_000_000_000, {(2, 100)}, Counts())
    return job_use(uses.get((2, 100), []))


def test_the_use_of_a_job_is_that_of_its_steps() -> None:
    assert use(RECORDED) == UNKNOWN | {
        "cpu_time_s": pytest.approx(0.039 + 2.550 + 1.132 + 1.552),
        # The batch step lasts as long as the job; the third step has more than both tasks of the first.
        "host_mem_peak_mib": pytest.approx((17076 + 315548) / 1024),
        "host_mem_task_peak_mib": pytest.approx(315548 / 1024),
    }


def step(name: str, **given: Any) -> str:
    value = {"Cluster": "lab", "JobIDRaw": f"2{name}", "State": "COMPLETED", "Submit": "100", "Start": "1000",
             "End": "1600", "NNodes": "1", "NodeList": "n1", "AllocTRES": "gres/gpu=1", "ExitCode": "0:0",
             "NTasks": "1", "TotalCPU": "01:00:00", "MaxRSS": "1048576K", "TRESUsageInMax": "", **given}  # fmt: skip
    return "|".join(value[column] for column in STEP_COLUMNS) + "\n"


def test_steps_at_one_time_add_up_and_tasks_count_as_the_largest() -> None:
    side_by_side = step("") + step(".batch", MaxRSS="1M") + step(".0", NTasks="4") + step(".1", Start="1599")
    assert use(side_by_side)["host_mem_peak_mib"] == 1 + 4 * 1024 + 1024
    assert use(side_by_side)["host_mem_task_peak_mib"] == 1024
    assert use(step("") + step(".0") + step(".1", Start="1600", End="1700"))["host_mem_peak_mib"] == 1024


NOTHING = {"TotalCPU": "00:00:00", "MaxRSS": ""}


def test_what_was_not_gathered_is_unknown_and_not_zero() -> None:
    for lines, known in [
        ([step(".batch", **NOTHING)], {}),  # jobacct_gather/none
        ([step(".batch"), step(".0", End="Unknown", **NOTHING)], {}),  # lost with its node
        ([step(".batch"), step(".0", **NOTHING)], {}),
        ([step(".batch"), step(".0", TotalCPU="soon", MaxRSS="16E")], {}),
        ([step(".batch"), step(".0", State="?")], {}),  # malformed: it may have used anything
        ([step(".batch"), step(".0", NTasks="")], {"cpu_time_s": 7200.0}),
        ([step(".batch", MaxRSS="0")], {"cpu_time_s": 3600.0}),
        # Cancelled before it ran, and too short to be sampled.
        ([step(".batch"), step(".0", Start="Unknown", **NOTHING), step(".1", End="1000", **NOTHING)],
         {"cpu_time_s": 3600.0, "host_mem_peak_mib": 1024.0, "host_mem_task_peak_mib": 1024.0}),
        ([step(".batch"), step(".0", End="1030", MaxRSS="")],
         {"cpu_time_s": 7200.0, "host_mem_peak_mib": 1024.0, "host_mem_task_peak_mib": 1024.0}),
        ([step(".batch"), step(".extern", **NOTHING)],
         {"cpu_time_s": 3600.0, "host_mem_peak_mib": 1024.0, "host_mem_task_peak_mib": 1024.0}),
        ([step(".extern")], {}),
        ([], {}),
    ]:  # fmt: skip
        assert use(step("") + "".join(lines)) == UNKNOWN | known


# As Colorado's Alpine cluster documents a job (ResearchComputing/Documentation, pull request 498).
ALPINE = "cpu=00:56:24,energy=0,fs/disk=350130624578,gres/gpumem=38888M,gres/gpuutil=100,mem=10372780K,pages=3465"
IDLE = "cpu=00:00:00,energy=0,fs/disk=5273,gres/gpumem=0,gres/gpuutil=0,mem=256K,pages=0,vmem=0"


def gpu_use(*lines: str) -> tuple[float | None, ...]:
    return tuple(use(step("") + "".join(lines))[name] for name in JOB_COLUMNS[3:])


def on_gpu(name: str, mib: float | str = 10_000, **given: str) -> str:
    return step(name, TRESUsageInMax=f"gres/gpumem={mib}M,gres/gpuutil=90", **given)


def test_gpu_memory_of_a_job_is_bounded_by_its_steps() -> None:
    silent = step(".batch", TRESUsageInMax=IDLE) + step(".extern", TRESUsageInMax=IDLE)
    assert gpu_use(step(".batch", TRESUsageInMax=ALPINE), step(".extern", TRESUsageInMax=IDLE)) == (38888, 38888, 100)
    assert gpu_use(silent, on_gpu(".0"), on_gpu(".1", 7000, Start="1600", End="1700")) == (10_000, 10_000, 90)
    assert gpu_use(silent, on_gpu(".0"), on_gpu(".1", 7000)) == (17_000, 10_000, 90), "both can use one GPU"
    four = {"AllocTRES": "gres/gpu=4"}
    assert gpu_use(on_gpu(".batch", 40_000, **four)) == (40_000, 10_000, 90), "one process on one GPU, or on four"
    assert gpu_use(silent, on_gpu(".0", NTasks="4", **four)) == (40_000, 2500, 90), "all tasks on one GPU, or spread"
    wide = {"NNodes": "4", "NodeList": "n[1-4]"}
    assert gpu_use(silent, on_gpu(".0", NTasks="4", **four, **wide)) == (10_000, 10_000, 90), "one task on each node"
    assert gpu_use(silent, on_gpu(".0", NTasks="6", **four, **wide)) == (30_000, 10_000, 90), "up to 3 on one node"


def test_gpu_memory_that_was_not_gathered_is_unknown_and_not_zero() -> None:
    unknown = (None, None, None)
    for lines in (
        [step(".batch", TRESUsageInMax=IDLE)],  # no AutoDetect, a MIG instance, or no process on the GPU
        [step(".batch", TRESUsageInMax="gres/gpumem=16E,gres/gpuutil=16E")],
        [step(".batch", TRESUsageInMax="gres/gpumem=18446744073709551615,gres/gpuutil=-1")],
        [step(".batch", TRESUsageInMax="cpu=00:56:24,mem=10G"), on_gpu(".0")],  # a step without a value
        [on_gpu(".0"), on_gpu(".1", End="Unknown")],  # lost with its node
        [on_gpu(".0", NTasks="")],
        [on_gpu(".0"), step(".1", State="?")],
        [on_gpu(".0", "-5")],
        [],
    ):
        assert gpu_use(*lines) == unknown, lines
    short = step(".1", End="1010", TRESUsageInMax="")
    assert gpu_use(on_gpu(".0"), short, step(".2", AllocTRES="cpu=1")) == (10_000, 10_000, 90), "short, and without GPU"
    assert gpu_use(step(".0", TRESUsageInMax="gres/gpumem:a100=4G,gres/gpumem:v100=1G")) == (5120, 5120, None)


def test_cpu_times_as_sacct_writes_them() -> None:
    for text, seconds in [
        ("00:12.345", 12.345), ("00:00:00", 0), ("01:02:03", 3723), ("1-02:03:04", 93784), ("10:02.5", 602.5),
        ("", None), ("12", None), ("-1:00", None), ("INVALID", None), ("١:٠٠", None),
    ]:  # fmt: skip
        assert parse_cpu_time(text) == (None if seconds is None else pytest.approx(seconds))


def test_sizes_as_slurm_writes_them() -> None:
    for text, mib in [
        ("214728K", 214728 / 1024), ("32000M", 32000), ("62.50G", 64000), ("1T", 2**20), ("1048576", 1), ("0", 0),
        ("", None), ("16E", None), ("16384P", None), ("-1K", None), ("1e3M", None), ("nanG", None),
    ]:  # fmt: skip
        assert size_mib(text) == mib
