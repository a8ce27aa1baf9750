"""CPU time and host memory of jobs, from what sacct says of their steps."""

from __future__ import annotations

from typing import Any

import pytest

from almanac.records import Counts
from almanac.tres import size_mib
from telemetry.sources.sacct_steps import COLUMNS, parse_steps
from telemetry.sources.sacct_usage import job_use, parse_cpu_time

# Recorded on 22.05.8 with jobacct_gather/linux: a batch step that starts 2 tasks, then two steps one after the other.
RECORDED = """\
lab|2|COMPLETED|100|1795448165|1795448185|1|n1|gres/gpu=1,mem=2000M|0:0||00:05.274|
lab|2.batch|COMPLETED|100|1795448165|1795448185|1|n1|gres/gpu=1,mem=2000M|0:0|1|00:00.039|17076K
lab|2.0|COMPLETED|100|1795448165|1795448173|1|n1|gres/gpu=1,mem=2000M|0:0|2|00:02.550|110620K
lab|2.1|COMPLETED|100|1795448173|1795448179|1|n1|gres/gpu=1,mem=500M|0:0|1|00:01.132|162048K
lab|2.2|COMPLETED|100|1795448179|1795448185|1|n1|gres/gpu=1,mem=500M|0:0|1|00:01.552|315548K
"""
UNKNOWN = {"cpu_time_s": None, "host_mem_peak_mib": None, "host_mem_task_peak_mib": None}


def use(text: str) -> dict[str, float | None]:
    _, uses = parse_steps(text.encode(), "|", "lab", 2_000_000_000, {(2, 100)}, Counts())
    return job_use(uses.get((2, 100), []))


def test_the_use_of_a_job_is_that_of_its_steps() -> None:
    assert use(RECORDED) == {
        "cpu_time_s": pytest.approx(0.039 + 2.550 + 1.132 + 1.552),
        # The batch step lasts as long as the job; the third step has more than both tasks of the first.
        "host_mem_peak_mib": pytest.approx((17076 + 315548) / 1024),
        "host_mem_task_peak_mib": pytest.approx(315548 / 1024),
    }


def step(name: str, **given: Any) -> str:
    value = {"Cluster": "lab", "JobIDRaw": f"2{name}", "State": "COMPLETED", "Submit": "100", "Start": "1000",
             "End": "1600", "NNodes": "1", "NodeList": "n1", "AllocTRES": "gres/gpu=1", "ExitCode": "0:0",
             "NTasks": "1", "TotalCPU": "01:00:00", "MaxRSS": "1048576K", **given}  # fmt: skip
    return "|".join(value[column] for column in COLUMNS) + "\n"


def test_steps_at_one_time_add_up_and_tasks_count_as_the_largest() -> None:
    side_by_side = step("") + step(".batch", MaxRSS="1M") + step(".0", NTasks="4") + step(".1", Start="1599")
    assert use(side_by_side)["host_mem_peak_mib"] == 1 + 4 * 1024 + 1024
    assert use(side_by_side)["host_mem_task_peak_mib"] == 1024
    assert use(step("") + step(".0") + step(".1", Start="1600", End="1700"))["host_mem_peak_mib"] == 1024


NOTHING = {"TotalCPU": "00:00:00", "MaxRSS": ""}


@pytest.mark.parametrize(
    ("lines", "known"),
    [
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
    ],
)  # fmt: skip
def test_what_was_not_gathered_is_unknown_and_not_zero(lines: list[str], known: dict[str, float]) -> None:
    assert use(step("") + "".join(lines)) == UNKNOWN | known


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:12.345", 12.345), ("00:00:00", 0), ("01:02:03", 3723), ("1-02:03:04", 93784), ("10:02.5", 602.5),
     ("", None), ("12", None), ("-1:00", None), ("INVALID", None), ("١:٠٠", None)],
)  # fmt: skip
def test_cpu_times_as_sacct_writes_them(text: str, seconds: float | None) -> None:
    assert parse_cpu_time(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("text", "mib"),
    [("214728K", 214728 / 1024), ("32000M", 32000), ("62.50G", 64000), ("1T", 2**20), ("1048576", 1), ("0", 0),
     ("", None), ("16E", None), ("16384P", None), ("-1K", None), ("1e3M", None), ("nanG", None)],
)  # fmt: skip
def test_sizes_as_slurm_writes_them(text: str, mib: float | None) -> None:
    assert size_mib(text) == mib
