"""squeue's fixed-width text: records are cut by bytes, so that no text of a user forges one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from squeue_text import squeue_record

from almanac.errors import CommandError
from slurm.running import parse_running


def read(**fields: str | bytes) -> dict[str, Any]:
    (row,), unreadable = parse_running(squeue_record(**fields))
    assert unreadable == 0
    return row


def test_record_becomes_a_row() -> None:
    assert read() == {
        "job_id": 5, "submit_s": 1795877270, "restarts": 0, "array_job_id": 2, "array_task_id": 1, "user": "alice",
        "account": "ml", "partition": "all", "name": "train", "node_list": "n1", "node_count": 1, "gpu_count": 2,
        "start_s": 1795877271, "limit_end_s": 1795880871, "is_interactive": False, "is_shared": False, "comment": "",
        "het_job_id": None, "het_offset": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_session"), [("interactive", True), ("sys/dashboard/sys/jupyter", True), ("interactive-fit", False)]
)
def test_sessions_of_people_are_interactive_by_name(name: str, is_session: bool) -> None:
    assert read(Name=name)["is_interactive"] is is_session


@given(st.binary(max_size=400).filter(lambda text: b"\0" not in text), st.text(max_size=300))
def test_no_name_or_comment_forges_a_squeue_record(name: bytes, comment: str) -> None:
    data = (
        squeue_record()
        + squeue_record(JobID="6", Name=name, Comment=comment.encode("utf-8", "replace"))
        + squeue_record(JobID="7")
    )
    rows, unreadable = parse_running(data)
    assert ([row["job_id"] for row in rows], unreadable) == ([5, 6, 7], 0)
    assert [row["name"] for row in rows if row["job_id"] != 6] == ["train", "train"]


def test_record_within_a_name_stays_a_name() -> None:
    row = read(Name=b"\n" + squeue_record(JobID="999")[:100])
    assert (row["job_id"], row["name"].startswith("\n999")) == (5, True)


@pytest.mark.parametrize(
    ("tres", "gpus", "is_shared"),
    [
        ("cpu=1,gres/gpu=4,gres/gpu:a100=4", 4, False), ("cpu=1,gres/gpu=1,gres/gpu:1g.10gb=1", 1, True),
        ("cpu=1,gres/gpu=2,gres/gpu:a100_2g.20gb=2", 2, True), ("cpu=1,gres/shard=3", 0, True),
        ("cpu=1,gres/mps:a100=50", 0, True),
    ],
)  # fmt: skip
def test_gpus_are_those_of_the_allocation(tres: str, gpus: int, is_shared: bool) -> None:
    row = read(tres_alloc=tres)
    assert (row["gpu_count"], row["is_shared"]) == (gpus, is_shared)


def test_missing_is_not_zero() -> None:
    assert read(Name=b"bad\xffname")["name"] is None
    assert read(Comment=b"bad\xff")["comment"] is None
    assert read(NodeList="n[" + "1," * 600 + "2]")["node_list"] is None
    assert read(TimeLimit="UNLIMITED", EndTime="N/A")["limit_end_s"] is None
    assert read(BatchFlag="0", ArrayTaskID="N/A")["is_interactive"]
    assert parse_running(squeue_record(tres_alloc="cpu=4,mem=1G,node=1")) == ([], 0)
    assert parse_running(squeue_record(StartTime="N/A") + squeue_record()) == ([read()], 1)


def test_a_text_that_may_be_cut_is_not_read() -> None:
    """A comment could lose almanac:keep, and TRES their GPUs."""
    assert read(Comment="x" * 255)["comment"] == "x" * 255
    for comment in ("x" * 256, "é" * 200, "x" * 250 + " almanac:keep"):
        assert read(Comment=comment)["comment"] is None
    tres = "cpu=1,gres/gpu=1,license/"
    assert read(tres_alloc=tres.ljust(255, "x"))["gpu_count"] == 1
    assert parse_running(squeue_record(tres_alloc=tres.ljust(256, "x")) + squeue_record()) == ([read()], 1)


def test_a_part_of_a_heterogeneous_job_names_it() -> None:
    row = read(HetJobID="4", HetJobOffset="1")
    assert (row["het_job_id"], row["het_offset"]) == (4, 1)
    assert parse_running(squeue_record(HetJobID="")) == ([], 1)


@pytest.mark.parametrize(
    "data", [b"slurm error\n", squeue_record()[:-1], squeue_record()[:-2] + b"xx", squeue_record() + b"\n"]
)
def test_other_output_is_refused(data: bytes) -> None:
    with pytest.raises(CommandError, match="not records of"):
        parse_running(data)
    assert parse_running(b"") == ([], 0)
