"""The Standard Workload Format: what is read, what is written, and what is no job."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import FileFormatError, RequestError
from simulator.cluster import uniform
from simulator.traces.read import open_trace
from simulator.traces.swf import is_swf, parse_swf, swf_text
from simulator.workload import Workload, make_workload

KEPT = ("submit_s", "run_s", "gpu_count", "time_limit_s", "state")
LINES = """\
; Version: 2.2
; UnixStartTime: 1000
;   MaxNodes: 4
; MaxProcs: 16
; Note: MaxProcs: 99
; Queue: 1 \x1b[31mred

  7  0  3  100  4 -1 -1  8  600 -1 1 5 2 9 1 3 -1 -1
  8 10 -1   50  2 -1 -1 -1  -1 -1 0 5 2 -1 1 3  7 30
  9 20  5    0  1 -1 -1  1   9 -1 5 6 2 9 1 3 -1 -1
 10 20  5    4  1 -1 -1  1   9 -1 5 6 2 9 1 3 -1 -1
 11 20  5   -1  1 -1 -1  1   9 -1 -1 6 2 9 1 3 -1 -1
 12 20  5    9  1 -1 -1  1   9 -1 3 6 2 9 1 3 -1 -1
 13 -1  5    9  1 -1 -1  1   9 -1 1 6 2 9 1 3 -1 -1
 14 30  5    9 -1 -1 -1 -1   9 -1 1 6 2 9 1 3 -1 -1
 15 30  5    9
 16 30  5    x  1 -1 -1  1   9 -1 1 6 2 9 1 3 -1 -1
"""


def test_lines_become_jobs_and_the_others_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.swf").write_text(LINES)
    trace = open_trace(tmp_path / "x.swf")
    jobs = trace.workload.jobs
    assert jobs["job_id"].tolist() == ["7", "8", "10"]
    assert jobs["submit_s"].tolist() == [1000, 1010, 1020]
    assert jobs["run_s"].tolist() == [100, 50, 4]
    assert jobs["start_s"].tolist() == [1003, -1, 1025]
    assert jobs["gpu_count"].tolist() == [8, 2, 1], "job 8 names no request"
    assert jobs["time_limit_s"].tolist() == [600, 0, 9]
    assert jobs["state"].tolist() == ["COMPLETED", "FAILED", "CANCELLED"]
    assert jobs[["user", "account", "name", "qos", "partition"]].to_numpy().tolist()[1] == ["5", "2", "", "1", "3"]
    assert trace.workload.dependencies == ((1, 0),)
    assert trace.workload.excluded == {
        "part of a job with checkpoints": 1,
        "not a line of 18 numbers": 2,
        "that never ran or have no end": 2,
        "without a submit time": 1,
        "without a GPU": 1,
    }
    assert trace.find_cluster() == uniform(4, 4)


def test_a_header_without_processors_names_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "x.swf").write_text("; MaxNodes: 4\n1 0 -1 5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1 -1\n")
    assert open_trace(tmp_path / "x.swf").find_cluster() is None


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"; anything", True),
        (b"\n\n ;x\n", True),
        (b"1 0 -1 5.5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1 -1", True),
        (b"1 0 -1 5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1 -1\n2 0", True),
        (b"1 0 -1 5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1\n", False),
        (b"job_id;submit_s\n1;2\n", False),
        (b"", False),
        (b"\n", False),
    ],
)
def test_the_format_is_found_by_its_first_line(start: bytes, expected: bool) -> None:
    assert is_swf(start) is expected


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e300", "99999999999999999999"])
def test_impossible_numbers_exclude_their_line_only(number: str) -> None:
    good = "2 0 -1 5 1 -1 -1 1 9 -1 1 1 1 1 1 1 -1 -1"
    for place in range(18):
        fields = good.split()
        fields[place] = number
        records = parse_swf([good, " ".join(fields)])
        work = make_workload(records.records)
        assert 1 <= len(work) <= 2
        assert len(work) + sum(work.excluded.values()) + sum(records.excluded.values()) == 2


def test_a_file_without_jobs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.swf").write_text("; Version: 2.2\n")
    with pytest.raises(RequestError, match="no job to simulate"):
        open_trace(tmp_path / "x.swf")
    (tmp_path / "x.swf").write_bytes(gzip.compress(LINES.encode())[:-30])
    with pytest.raises(FileFormatError, match="cannot be read"):
        open_trace(tmp_path / "x.swf")


texts = st.sampled_from(["", "ann", "bob", "0", "7", "x\ny", "\x1b[2J", "; MaxProcs: 1"])
records = st.lists(
    st.fixed_dictionaries(
        {
            "submit_s": st.integers(0, 2**35), "run_s": st.integers(1, 2**35), "gpu_count": st.integers(1, 10**6),
            "time_limit_s": st.integers(0, 2**35), "state": st.sampled_from(["", "FAILED", "COMPLETED", "CANCELLED"]),
            "user": texts, "account": texts, "partition": texts, "qos": texts, "name": texts,
            "depends_on": st.sampled_from(["", "0", "1", "2"]),
        }
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def groups(work: Workload, name: str) -> list[int]:
    """Number of each job's value, in the order of appearance; -1 for none."""
    values = work.array(name).tolist()
    numbers = {value: number for number, value in enumerate(dict.fromkeys(value for value in values if value))}
    return [numbers.get(value, -1) for value in values]


@given(records)
def test_what_is_written_is_read_again(rows: list[dict[str, object]]) -> None:
    frame = pd.DataFrame(rows)
    frame["job_id"] = np.arange(len(frame)).astype(str)
    work = make_workload(frame)
    text = swf_text(work, uniform(3, 8))
    again = make_workload(parse_swf(text.splitlines()).records)
    for name in KEPT:
        assert again.array(name).tolist() == work.array(name).tolist(), name
    for name in ("user", "account", "partition", "qos", "name"):
        assert groups(again, name) == groups(work, name), name
    assert len(again.dependencies) == len(work.dependencies)
    assert set(again.dependencies) == set(work.dependencies)
    assert swf_text(again, uniform(3, 8)) == text, "numbers stay as they are"
    assert text.isascii()
    assert "\x1b" not in text


def test_the_written_cluster_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "x.swf").write_text(LINES)
    (tmp_path / "y.swf").write_text(swf_text(open_trace(tmp_path / "x.swf").workload, uniform(5, 6)))
    assert open_trace(tmp_path / "y.swf").find_cluster() == uniform(5, 6)
