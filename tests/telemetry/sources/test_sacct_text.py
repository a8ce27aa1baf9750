from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.records import Counts
from telemetry.sources.sacct_text import COLUMNS, columns, parse_text

DELIMITER = "|~5f~|"
NOW_S = 1_800_000_000
JOB = {
    "Cluster": "lab", "JobIDRaw": "7", "JobID": "7", "User": "alice", "Account": "ml", "Partition": "all",
    "QOS": "normal", "State": "COMPLETED", "Submit": "1799990000", "Eligible": "1799990050",
    "Start": "1799990100", "End": "1799990400",
    "ElapsedRaw": "300", "TimelimitRaw": "60", "NNodes": "2", "NodeList": "n[1-2]", "ReqCPUS": "2", "AllocCPUS": "64",
    "Constraints": "gpu&hbm80g",
    "AllocTRES": "cpu=64,gres/gpu:a100=8,gres/gpu=8,mem=62.50G", "ReqTRES": "cpu=2,gres/gpu=8,node=2",
    "ExitCode": "0:15",
}  # fmt: skip


def line(**changes: str) -> str:
    return DELIMITER.join({**JOB, **changes}[name] for name in COLUMNS)


def parse(*lines: str) -> tuple[list[dict[str, Any]], Counts]:
    counts = Counts()
    rows = parse_text("\n".join([*lines, ""]).encode(), DELIMITER, COLUMNS, "lab", NOW_S, counts)
    assert counts.seen == counts.kept + counts.dropped.total()
    assert counts.kept == len(rows)
    return rows, counts


def test_the_whole_of_a_row() -> None:
    [row], _ = parse(line())
    assert row == {
        "job_id": 7, "array_job_id": None, "array_task_id": None, "het_job_id": None, "het_offset": None,
        "user": "alice", "account": "ml", "partition": "all", "qos": "normal", "state": "COMPLETED",
        "submit_s": 1799990000, "eligible_s": 1799990050, "start_s": 1799990100, "end_s": 1799990400,
        "elapsed_s": 300, "time_limit_s": 3600,
        "node_count": 2, "node_list": "n[1-2]", "cpu_count": 64, "gpu_count": 8, "gpu_count_req": 8,
        "gpu_share_count": None,
        "cpu_count_req": 2, "node_count_req": 2, "gpu_type": "a100", "gpu_type_req": "", "constraints": "gpu&hbm80g",
        "restarts": None, "exit_code": 0, "exit_signal": 15, "host_mem_alloc_mib": 64000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"JobIDRaw": "7.batch"}, "job id is not a number"),
        ({"JobIDRaw": ""}, "job id is not a number"),
        ({"JobIDRaw": "٧"}, "job id is not a number"),
        ({"JobID": "seven"}, "job id is not a number"),
        ({"JobID": "7_x"}, "job id is not a number"),
        ({"State": ""}, "unreadable state"),
        ({"Submit": "2026-11-21T00:00:00"}, "unreadable time"),
        ({"Submit": "Unknown"}, "unreadable time"),
        ({"End": "soon"}, "unreadable time"),
        ({"End": "9" * 30}, "unreadable time"),
        ({"End": "1799990000", "Start": "1799990100"}, "ends before it starts"),
        ({"Start": str(NOW_S + 1), "End": "Unknown"}, "in the future"),
        ({"End": str(NOW_S + 1)}, "in the future"),
        ({"Submit": str(NOW_S + 1), "Start": "Unknown", "End": "Unknown"}, "in the future"),
        ({"Cluster": "other"}, "job of another cluster"),
        ({"Cluster": ""}, "job of another cluster"),
        ({"Account": f"ml{DELIMITER}x"}, "wrong number of fields"),
    ],
)
def test_a_bad_record_is_counted_and_the_others_kept(changes: dict[str, str], reason: str) -> None:
    rows, counts = parse(line(JobIDRaw="6", JobID="6"), line(**changes), line(JobIDRaw="8", JobID="8"))
    assert [row["job_id"] for row in rows] == [6, 8]
    assert dict(counts.dropped) == {reason: 1}
    assert counts.examples[reason].isprintable() and DELIMITER not in counts.examples[reason]


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [
        ("13_0", (13, 0, None, None)),
        ("89_[0-3%1]", (89, None, None, None)),
        ("89_[0-3,5,...", (89, None, None, None)),
        ("50+1", (None, None, 50, 1)),
        ("7", (None, None, None, None)),
    ],
)
def test_array_and_het_ids(job_id: str, expected: tuple[int | None, ...]) -> None:
    [row], _ = parse(line(JobID=job_id))
    assert (row["array_job_id"], row["array_task_id"], row["het_job_id"], row["het_offset"]) == expected


@pytest.mark.parametrize("limit", ["UNLIMITED", "Partition_Limit", ""])
def test_a_limit_that_is_no_number_is_none(limit: str) -> None:
    assert parse(line(TimelimitRaw=limit))[0][0]["time_limit_s"] is None


@pytest.mark.parametrize(
    ("asked", "given", "shares"),
    [
        ("cpu=8,gres/shard=8", "cpu=8,gres/shard=8", 8), ("cpu=8,gres/shard=8", "", 8),
        ("cpu=8", "cpu=8,gres/shard:a100=4,gres/shard=4", 4), ("cpu=8,gres/mps=50", "cpu=8,gres/mps=50", 50),
        ("cpu=8,gres/gpu=1", "cpu=8,gres/gpu=1", None),
    ],
)  # fmt: skip
def test_a_part_of_a_gpu_is_counted_as_such(asked: str, given: str, shares: int | None) -> None:
    [row], counts = parse(line(ReqTRES=asked, AllocTRES=given))
    assert row["gpu_share_count"] == shares
    assert list(counts.notes) == (["with a part of a GPU (shard, mps): not measured"] if shares else [])


@pytest.mark.parametrize(("cut", "state"), [("OUT_OF_ME+", "OUT_OF_MEMORY"), ("NODE_FA+", "NODE_FAIL"), ("RE+", None)])
def test_a_state_cut_short_is_read_as_in_files(cut: str, state: str | None) -> None:
    [row], counts = parse(line(State=cut))
    assert (row["state"], counts.notes) == (state, {} if state else {"state not understood": 1})


def test_who_cancelled_is_no_part_of_the_state() -> None:
    assert parse(line(State="CANCELLED by 1000"))[0][0]["state"] == "CANCELLED"


def test_a_job_cancelled_before_it_ran_never_started() -> None:
    changes = {"State": "CANCELLED by 0", "Start": "None", "NodeList": "None assigned", "AllocTRES": ""}
    [row], _ = parse(line(ElapsedRaw="0", AllocCPUS="0", **changes))
    expected = {"start_s": None, "elapsed_s": None, "node_list": None, "gpu_count": None, "cpu_count": 2}
    assert {key: row[key] for key in expected} == expected
    assert row["end_s"] == 1799990400


def test_empty_fields_are_unknown_but_no_constraint_is_known() -> None:
    [row], _ = parse(line(User="", Account="", QOS="", Constraints="", ReqTRES="", ExitCode=""))
    assert (row["user"], row["account"], row["qos"], row["constraints"]) == (None, None, None, "")
    assert (row["gpu_count_req"], row["exit_code"], row["exit_signal"]) == (None, None, None)


def test_a_record_twice_in_one_answer_is_kept_once_the_last_one() -> None:
    [row], counts = parse(line(State="RUNNING", End="Unknown"), line())
    assert row["state"] == "COMPLETED"
    assert dict(counts.dropped) == {"repeated record of a job": 1}


def test_the_cluster_is_matched_without_case_as_slurm_stores_it() -> None:
    assert parse(line(Cluster="LAB"))[0]


def test_a_column_is_asked_for_only_where_sacct_knows_it() -> None:
    assert columns("JobID  ReqTRES\nReservation") == COLUMNS
    assert columns("Reservation   Restarts  Start") == (*COLUMNS[:-1], "Restarts", "ExitCode")


@pytest.mark.parametrize(
    ("changes", "eligible_s"),
    [
        ({}, 1799990050),
        ({"Eligible": "Unknown"}, None),
        ({"Eligible": "0"}, None),
        ({"Eligible": "soon"}, None),
        ({"Eligible": "5"}, 1799990000),
        ({"Eligible": "1799999999"}, 1799990100),
        ({"Eligible": str(NOW_S + 9000), "Start": "Unknown", "End": "Unknown"}, NOW_S + 9000),
    ],
)
def test_a_job_is_eligible_between_its_submission_and_its_start(
    changes: dict[str, str], eligible_s: int | None
) -> None:
    [row], _ = parse(line(**changes))
    assert row["eligible_s"] == eligible_s


@given(st.sampled_from([name for name in COLUMNS if name not in ("Cluster", "ExitCode")]), st.text())
def test_no_field_but_the_drawn_delimiter_makes_another_row(name: str, text: str) -> None:
    hostile = text + "\n" + line(JobIDRaw="999", JobID="999").replace(DELIMITER, "|~other~|") + "\n"
    rows, _ = parse(line(JobIDRaw="6", JobID="6"), line(**{name: hostile}))
    assert 999 not in [row["job_id"] for row in rows]
    assert rows[0]["job_id"] == 6


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    counts = Counts()
    rows = parse_text(data, DELIMITER, COLUMNS, "lab", NOW_S, counts)
    assert counts.seen == len(rows) + counts.dropped.total()
