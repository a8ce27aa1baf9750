"""CPUs and host memory in a report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reports.job.conclusions import conclude
from reports.job.context import JobContext
from reports.job.facts import facts_of
from reports.job.figures import figure_rows

MEMORY = {"host_mem_alloc_mib": 65536.0, "host_mem_peak_mib": 12800.0, "host_mem_task_peak_mib": 3200.0}


def with_host(context: JobContext, **values: Any) -> JobContext:
    return dataclasses.replace(context, job={**context.job, **values})  # type: ignore[typeddict-item]


def shown(context: JobContext) -> dict[str, tuple[str, str]]:
    return {row.name: (row.value, row.about) for row in figure_rows(context) if "CPU" in row.name or "host" in row.name}


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, {}),
        # 16 CPUs for an hour.
        ({"cpu_time_s": 6912.0}, {"CPU use": ("12%", "1.9 of 16 CPUs busy on average")}),
        ({"cpu_time_s": 6912.0, "cpu_count": None}, {}),
        ({"cpu_time_s": 6912.0, "elapsed_s": 0}, {}),
        (MEMORY, {"Peak host memory": ("12.5 GiB of 64.0 GiB", "20% at most; the largest task used 3.1 GiB")}),
        (
            MEMORY | {"host_mem_task_peak_mib": 12700.0},
            {"Peak host memory": ("12.5 GiB of 64.0 GiB", "20% of what the job was given")},
        ),
        (MEMORY | {"host_mem_alloc_mib": None, "host_mem_task_peak_mib": None}, {"Peak host memory": ("12.5 GiB", "")}),
        ({"host_mem_alloc_mib": 65536.0}, {}),
        (
            {"cpu_time_s": 3.6e5, "cpu_count": 512, "host_mem_peak_mib": 163_226.0, "host_mem_alloc_mib": 1_024_000.0},
            {
                "CPU use": ("20%", "100 of 512 CPUs busy on average"),
                "Peak host memory": ("159 GiB of 1,000 GiB", "16% of what the job was given"),
            },
        ),
    ],
)
def test_only_what_was_gathered_has_a_line(reported: Any, values: dict[str, Any], rows: dict[str, Any]) -> None:
    assert shown(with_host(reported.contexts["balanced"], **values)) == rows


def test_idle_gpus_beside_busy_cpus_are_said_to_wait_for_them(reported: Any) -> None:
    context = reported.contexts["array-task"]
    assert "low_use" in conclude(facts_of(context)).rules
    cpus = context.job["cpu_count"] * context.elapsed_s
    busy, free = (conclude(facts_of(with_host(context, cpu_time_s=share * cpus))) for share in (0.95, 0.5))
    assert "low_use_busy_cpus" in busy.rules and "low_use" in free.rules
    assert "95% of 16 CPUs" in busy.suggestions[0].reason
