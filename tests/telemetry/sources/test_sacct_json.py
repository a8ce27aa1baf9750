from __future__ import annotations

import json
from typing import Any

import pytest

from telemetry.slurm.script_key import script_key
from telemetry.sources.sacct_json import JobText, number, parse_json


def job(**changes: Any) -> dict[str, Any]:
    return {
        "job_id": 7, "cluster": "lab", "name": "train", "time": {"submission": 100}, "comment": {"administrator": "a"},
        **changes,
    }  # fmt: skip


def parse(*jobs: Any) -> dict[tuple[int, int], JobText]:
    return parse_json(json.dumps({"jobs": list(jobs)}).encode(), "lab")


def test_texts_by_job_id_and_submit_time() -> None:
    again = job(name="later", time={"submission": {"set": True, "infinite": False, "number": 200}})
    assert parse(job(), again) == {(7, 100): JobText("train", "a"), (7, 200): JobText("later", "a")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, JobText(None, "a")),
        ({"name": ""}, JobText("", "a")),
        ({"name": "allocation"}, JobText("", "a")),
        ({"name": 3}, JobText(None, "a")),
        ({"comment": {"administrator": None}}, JobText("train")),
        ({"comment": "text"}, JobText("train")),
        ({"comment": None}, JobText("train")),
    ],
)
def test_missing_texts(changes: dict[str, Any], expected: JobText) -> None:
    assert parse(job(**changes)) == {(7, 100): expected}


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("almanac:nomail", True),
        ("run 7, almanac:nomail; seed 3", True),
        ("first line\nalmanac:nomail", True),
        ("almanac:nomails", False),
        ("my-almanac:nomail", False),
        ("ALMANAC:NOMAIL", False),
        ("", False),
        (None, False),
        (7, False),
    ],
)
def test_a_comment_can_refuse_mail(comment: Any, expected: bool) -> None:
    said = {"administrator": "almanac:nomail", "job": comment}
    (text,) = parse(job(comment=said)).values()
    assert (text.name, text.admin_comment, text.refuses_mail) == ("train", "almanac:nomail", expected)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("almanac:packed", True),
        ("run 7\nalmanac:nomail almanac:packed", True),
        ("almanac:packed-2", False),
        ("seed 3", False),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_comment_can_say_that_a_job_was_packed(comment: Any, expected: bool | None) -> None:
    """Without a comment it is not known: where slurmdbd keeps none, each looks empty."""
    (text,) = parse(job(comment={"administrator": "almanac:packed", "job": comment})).values()
    assert text.is_packed is expected


@pytest.mark.parametrize(
    "bad", [None, "x", 3, [], job(cluster="other"), job(job_id="7"), job(job_id=True), job(time=None), job(time={})]
)
def test_records_that_name_no_job_of_this_cluster_are_passed_over(bad: Any) -> None:
    assert list(parse(bad, job())) == [(7, 100)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sbatch --parsable -p a40,a100 -G 1 train.sh", "a40,a100"),
        ("srun --partition=a100,a40 true", "a100,a40"),
        ("sbatch -pa40,a100 -p a100,h100 --wrap sleep 8", "a100,h100"),
        ("sbatch -p a100 train.sh", ""),
        ("sbatch -p a40,h100 train.sh", ""),
        ("sbatch train.sh -p a40,a100", ""),
        ("sbatch -p a40,a100 : -p a100 train.sh", ""),
        ("sbatch -J my job -p a40,a100 train.sh", ""),
        ("sbatch -p", ""),
        ("", ""),
        (None, ""),
        (7, ""),
        ("sbatch\n-p\na100,$(reboot)\x1b[31m\ud800 x", "a100,$(reboot)\x1b[31m?"),
    ],
)
def test_partitions_are_those_that_the_submit_line_lists_beside_the_one_it_ran_in(line: Any, expected: str) -> None:
    texts = parse(job(submit_line=line, partition="a100"))
    assert texts == {(7, 100): JobText("train", "a", partitions=expected)}


LINE = "sbatch -J x run.sh --lr=1"


def test_a_script_is_kept_as_a_hash() -> None:
    texts = parse(job(user="ann", submit_line=LINE, working_directory="/home/ann"))
    assert texts == {(7, 100): JobText("train", "a", script_key=script_key("ann", LINE, "/home/ann"))}
    assert "run.sh" not in repr(texts)


@pytest.mark.parametrize(
    "missing",
    [{"user": None}, {"submit_line": None}, {"working_directory": 7}, {"het": {"job_id": 7}}],
)
def test_no_script_is_known_where_the_record_lacks_a_part(missing: dict[str, Any]) -> None:
    whole = {"user": "ann", "submit_line": LINE, "working_directory": "/home/ann"}
    assert parse(job(**{**whole, **missing})) == {(7, 100): JobText("train", "a")}


def test_sacct_says_why_there_are_no_jobs() -> None:
    data = b'{"errors": [{"description": "Unable to parse time format"}]}'
    with pytest.raises(ValueError, match="no list of jobs: Unable to parse time format"):
        parse_json(data, "lab")


def test_nothing_found_is_no_failure() -> None:
    assert parse_json(b'{"jobs": [], "errors": [{"description": "Nothing found"}]}', "lab") == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5), (0, 0), (True, None), ("5", None), (None, None), (5.0, None), ({}, None),
        ({"set": True, "infinite": False, "number": 5}, 5), ({"set": False, "infinite": False, "number": 5}, None),
        ({"set": True, "infinite": True, "number": 5}, None), ({"set": True, "number": "5"}, None),
    ],
)  # fmt: skip
def test_numbers_of_either_shape(value: Any, expected: int | None) -> None:
    assert number(value) == expected
