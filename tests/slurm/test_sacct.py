"""sacct's jobs: rows of its text, names and comments of its JSON, and both against recorded outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.records import Counts
from slurm.sacct import COLUMNS, JobText, columns, parse_json, parse_text

ODD = Path(__file__).parent / "fixtures/25.11.7"
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
    [({"JobIDRaw": "7.batch"}, "job id is not a number"), ({"JobIDRaw": ""}, "job id is not a number"),
     ({"JobIDRaw": "٧"}, "job id is not a number"), ({"JobID": "seven"}, "job id is not a number"),
     ({"JobID": "7_x"}, "job id is not a number"), ({"State": ""}, "unreadable state"),
     ({"Submit": "2026-11-21T00:00:00"}, "unreadable time"), ({"Submit": "Unknown"}, "unreadable time"),
     ({"End": "soon"}, "unreadable time"), ({"End": "9" * 30}, "unreadable time"),
     ({"End": "1799990000", "Start": "1799990100"}, "ends before it starts"),
     ({"Start": str(NOW_S + 1), "End": "Unknown"}, "in the future"), ({"End": str(NOW_S + 1)}, "in the future"),
     ({"Submit": str(NOW_S + 1), "Start": "Unknown", "End": "Unknown"}, "in the future"),
     ({"Cluster": "other"}, "job of another cluster"), ({"Cluster": ""}, "job of another cluster"),
     ({"Account": f"ml{DELIMITER}x"}, "wrong number of fields")],
)  # fmt: skip
def test_a_bad_record_is_counted_and_the_others_kept(changes: dict[str, str], reason: str) -> None:
    rows, counts = parse(line(JobIDRaw="6", JobID="6"), line(**changes), line(JobIDRaw="8", JobID="8"))
    assert [row["job_id"] for row in rows] == [6, 8]
    assert dict(counts.dropped) == {reason: 1}
    assert counts.examples[reason].isprintable() and DELIMITER not in counts.examples[reason]


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [("13_0", (13, 0, None, None)), ("89_[0-3%1]", (89, None, None, None)), ("89_[0-3,5,...", (89, None, None, None)),
     ("50+1", (None, None, 50, 1)), ("7", (None, None, None, None))],
)  # fmt: skip
def test_array_and_het_ids(job_id: str, expected: tuple[int | None, ...]) -> None:
    [row], _ = parse(line(JobID=job_id))
    assert (row["array_job_id"], row["array_task_id"], row["het_job_id"], row["het_offset"]) == expected


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
    assert list(counts.notes) == (["with a part of a GPU (shard, mps): measured only if alone on it"] if shares else [])


@pytest.mark.parametrize(("cut", "state"), [("OUT_OF_ME+", "OUT_OF_MEMORY"), ("NODE_FA+", "NODE_FAIL"), ("RE+", None)])
def test_a_state_cut_short_is_read_as_in_files(cut: str, state: str | None) -> None:
    [row], counts = parse(line(State=cut))
    assert (row["state"], counts.notes) == (state, {} if state else {"state not understood": 1})


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
    [({}, 1799990050), ({"Eligible": "Unknown"}, None), ({"Eligible": "0"}, None), ({"Eligible": "soon"}, None),
     ({"Eligible": "5"}, 1799990000), ({"Eligible": "1799999999"}, 1799990100),
     ({"Eligible": str(NOW_S + 9000), "Start": "Unknown", "End": "Unknown"}, NOW_S + 9000)],
)  # fmt: skip
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


def job(**changes: Any) -> dict[str, Any]:
    return {
        "job_id": 7, "cluster": "lab", "name": "train", "time": {"submission": 100}, "comment": {"administrator": "a"},
        **changes,
    }  # fmt: skip


def texts_of(*jobs: Any) -> dict[tuple[int, int], JobText]:
    return parse_json(json.dumps({"jobs": list(jobs)}).encode(), "lab")


def test_texts_by_job_id_and_submit_time() -> None:
    again = job(name="later", time={"submission": {"set": True, "infinite": False, "number": 200}})
    assert texts_of(job(), again) == {(7, 100): JobText("train", "a"), (7, 200): JobText("later", "a")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"name": None}, JobText(None, "a")), ({"name": ""}, JobText("", "a")),
     ({"name": "allocation"}, JobText("", "a")), ({"name": 3}, JobText("3", "a")),
     ({"name": ["x"]}, JobText(None, "a")), ({"comment": {"administrator": None}}, JobText("train")),
     ({"comment": "text"}, JobText("train")), ({"comment": None}, JobText("train"))],
)  # fmt: skip
def test_missing_texts(changes: dict[str, Any], expected: JobText) -> None:
    assert texts_of(job(**changes)) == {(7, 100): expected}


def test_a_comment_can_refuse_mail() -> None:
    for comment, expected in [
        ("almanac:nomail", True), ("run 7, almanac:nomail; seed 3", True), ("first line\nalmanac:nomail", True),
        ("almanac:nomails", False), ("my-almanac:nomail", False), ("ALMANAC:NOMAIL", False), ("", False),
        (None, False), (7, False),
    ]:  # fmt: skip
        said = {"administrator": "almanac:nomail", "job": comment}
        (text,) = texts_of(job(comment=said)).values()
        assert (text.name, text.admin_comment, text.refuses_mail) == ("train", "almanac:nomail", expected)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [("almanac:packed", True), ("run 7\nalmanac:nomail almanac:packed", True), ("almanac:packed-2", False),
     ("seed 3", False), ("", None), (None, None), (7, None)],
)  # fmt: skip
def test_a_comment_can_say_that_a_job_was_packed(comment: Any, expected: bool | None) -> None:
    """Without a comment it is not known: where slurmdbd keeps none, each looks empty."""
    (text,) = texts_of(job(comment={"administrator": "almanac:packed", "job": comment})).values()
    assert text.is_packed is expected


def test_records_that_name_no_job_of_this_cluster_are_passed_over() -> None:
    for bad in [
        None, "x", 3, [], job(cluster="other"), job(job_id="7"), job(job_id=True), job(time=None), job(time={}),
    ]:  # fmt: skip
        assert list(texts_of(bad, job())) == [(7, 100)]


def test_partitions_are_those_that_the_submit_line_lists_beside_the_one_it_ran_in() -> None:
    for line, expected in [
        ("sbatch --parsable -p a40,a100 -G 1 train.sh", "a40,a100"), ("srun --partition=a100,a40 true", "a100,a40"),
        ("sbatch -pa40,a100 -p a100,h100 --wrap sleep 8", "a100,h100"), ("sbatch -p a100 train.sh", ""),
        ("sbatch -p a40,h100 train.sh", ""), ("sbatch train.sh -p a40,a100", ""),
        ("sbatch -p a40,a100 : -p a100 train.sh", ""), ("sbatch -J my job -p a40,a100 train.sh", ""),
        ("sbatch -p", ""), ("", ""), (None, ""), (7, ""),
        ("sbatch\n-p\na100,$(reboot)\x1b[31m\ud800 x", "a100,$(reboot)\x1b[31m?"),
    ]:  # fmt: skip
        texts = texts_of(job(submit_line=line, partition="a100"))
        assert texts == {(7, 100): JobText("train", "a", partitions=expected)}


LINE = "sbatch -J x run.sh --lr=1"


@pytest.mark.parametrize(
    "missing", [{"user": None}, {"submit_line": None}, {"working_directory": 7}, {"het": {"job_id": 7}}]
)
def test_no_script_is_known_where_the_record_lacks_a_part(missing: dict[str, Any]) -> None:
    whole = {"user": "ann", "submit_line": LINE, "working_directory": "/home/ann"}
    assert texts_of(job(**{**whole, **missing})) == {(7, 100): JobText("train", "a")}


def test_sacct_says_why_there_are_no_jobs() -> None:
    data = b'{"errors": [{"description": "Unable to parse time format"}]}'
    with pytest.raises(ValueError, match="no list of jobs: Unable to parse time format"):
        parse_json(data, "lab")


def test_nothing_found_is_no_failure() -> None:
    assert parse_json(b'{"jobs": [], "errors": [{"description": "Nothing found"}]}', "lab") == {}


def test_odd_jobs_of_25_11() -> None:
    """Each of ids 1 to 48 that accounting knows (fixtures/README.md); values checked by hand."""
    counts, names = Counts(), (*COLUMNS[:-1], "Restarts", COLUMNS[-1])
    rows = parse_text((ODD / "odd_sacct.txt").read_bytes(), "|~5f~|", names, "lab", NOW_S, counts)
    assert (len(rows), counts.kept, counts.dropped, counts.notes.total()) == (26, 26, {}, 1)
    texts = parse_json((ODD / "odd_sacct.json").read_bytes(), "lab")
    assert texts.keys() == {(row["job_id"], row["submit_s"]) for row in rows}
    first, again, *_ = rows
    assert [(row["job_id"], row["state"], row["restarts"], row["exit_code"]) for row in (first, again)] == [
        (1, "REQUEUED", 0, 1), (1, "REQUEUED", 1, 1),
    ]  # fmt: skip
    jobs = {row["job_id"]: row for row in rows}
    gpus = {job_id: (row["gpu_count"], row["gpu_count_req"], row["gpu_type"]) for job_id, row in jobs.items()}
    assert gpus[3] == (8, 0, "a100"), "--exclusive without a GPU request gets all of its nodes"
    assert (gpus[4], gpus[12]) == ((2, 2, "a100"), (2, 2, "a100"))
    assert (gpus[15], jobs[15]["gpu_share_count"]) == ((0, 0, None), 2)
    assert (gpus[25], jobs[25]["start_s"], jobs[25]["state"]) == ((None, 4, None), None, "CANCELLED")
    assert [(jobs[n]["exit_code"], jobs[n]["exit_signal"]) for n in (22, 23, 24)] == [(3, 0), (200, 0), (0, 9)]
    assert (jobs[9]["array_job_id"], jobs[9]["array_task_id"]) == (8, 1)
    assert (jobs[12]["het_job_id"], jobs[12]["het_offset"], jobs[12]["constraints"]) == (11, 1, "hbm80g")
    assert (jobs[44]["start_s"], jobs[44]["node_list"], jobs[44]["node_count_req"]) == (None, None, 2)
    assert (jobs[47]["time_limit_s"], jobs[2]["time_limit_s"], jobs[48]["state"]) == (None, 60, "SUSPENDED")
    assert {text.name for (job_id, _), text in texts.items() if job_id == 31} == {"тренировка_日本_ünï"}


def test_a_name_that_is_not_utf8_is_read() -> None:
    data = json.dumps({"jobs": [job(name="bad??")]}).encode().replace(b"??", b"\xff\xfe")
    assert parse_json(data, "lab") == {(7, 100): JobText("bad\ufffd\ufffd", "a")}
