"""CPUs and host memory in a report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from almanac.records import HostOption
from reports.job.conclusions import conclude
from reports.job.evidence import JobContext, figure_rows
from reports.job.facts import facts_of

MEMORY = {"host_mem_alloc_mib": 65536.0, "host_mem_peak_mib": 12800.0, "host_mem_task_peak_mib": 3200.0}


def with_host(context: JobContext, **values: Any) -> JobContext:
    return dataclasses.replace(context, job={**context.job, **values})  # type: ignore[typeddict-item]


def shown(context: JobContext) -> dict[str, tuple[str, str]]:
    return {
        row.name: (row.value, row.about)
        for row in figure_rows(context)
        if row.name in ("CPU efficiency", "Host memory")
    }


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, {}),
        # 16 CPUs for an hour.
        ({"cpu_time_s": 6912.0}, {"CPU efficiency": ("12%", "1.9 of 16 CPUs busy on average")}),
        ({"cpu_time_s": 6912.0, "cpu_count": None}, {}),
        ({"cpu_time_s": 6912.0, "elapsed_s": 0}, {}),
        (MEMORY, {"Host memory": ("12.5 GiB of 64.0 GiB", "20% at most; the largest task used 3.1 GiB")}),
        (MEMORY | {"host_mem_task_peak_mib": 12700.0},
         {"Host memory": ("12.5 GiB of 64.0 GiB", "20% of what the job was given")}),
        (MEMORY | {"host_mem_alloc_mib": None, "host_mem_task_peak_mib": None}, {"Host memory": ("12.5 GiB", "")}),
        ({"host_mem_alloc_mib": 65536.0}, {}),
        ({"cpu_time_s": 0.5, "cpu_count": 1, "host_mem_peak_mib": 0.7, "host_mem_alloc_mib": 1024.0},
         {"CPU efficiency": ("less than 1%", "less than 0.01 of 1 CPU busy on average"),
          "Host memory": ("1 MiB of 1.0 GiB", "less than 1% of what the job was given")}),
        ({"cpu_time_s": 3.6e5, "cpu_count": 512, "host_mem_peak_mib": 163_226.0, "host_mem_alloc_mib": 1_024_000.0},
         {"CPU efficiency": ("20%", "100 of 512 CPUs busy on average"),
          "Host memory": ("159 GiB of 1,000 GiB", "16% of what the job was given")}),
    ],
)  # fmt: skip
def test_only_what_was_gathered_has_a_line(reported: Any, values: dict[str, Any], rows: dict[str, Any]) -> None:
    assert shown(with_host(reported.contexts["balanced"], **values)) == rows


def test_idle_gpus_beside_busy_cpus_are_said_to_wait_for_them(reported: Any) -> None:
    context = reported.contexts["array-task"]
    assert "low_use" in conclude(facts_of(context)).rules
    cpus = context.job["cpu_count"] * context.elapsed_s
    busy, free = (conclude(facts_of(with_host(context, cpu_time_s=share * cpus))) for share in (0.95, 0.5))
    assert "low_use_busy_cpus" in busy.rules and "low_use" in free.rules
    assert "95% of 16 CPUs" in busy.suggestions[0].reason


OPTIONS = (
    HostOption("memory", "--mem=4G", 4096.0, 65_536.0, 2560.0, 12, 0.01),
    HostOption("cpus", "--cpus-per-task=2", 2.0, 16.0, 1.2, 12, 0.01),
)
CPU_ONLY = {"gpu_count": 0, "gpu_count_req": 0, "host_mem_alloc_mib": 65_536.0, "host_mem_peak_mib": 2048.0}


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        (CPU_ONLY, {"host_memory_bound", "cpus_bound"}),
        # The whole node came without being asked for, as with --exclusive.
        ({**CPU_ONLY, "cpu_count_req": 4}, set()),
        ({**CPU_ONLY, "state": "CANCELLED"}, set()),
        # A quarter of a node's GPUs, with a quarter of its CPUs and more of its memory.
        ({"gpu_count": 1, "node_gpu_count": 4, "node_cpu_count": 64, "node_memory_mib": 131_072,
          "host_mem_alloc_mib": 65_536.0, "host_mem_peak_mib": 2048.0}, {"host_memory_bound"}),
    ],
)  # fmt: skip
def test_options_with_a_stated_risk_are_advised_where_less_serves_others(
    reported: Any, values: dict[str, Any], rules: set[str]
) -> None:
    context = dataclasses.replace(with_host(reported.contexts["balanced"], **values), host=OPTIONS, advice=None)
    conclusions = conclude(facts_of(context))
    assert {rule for rule in conclusions.rules if rule.endswith("_bound") and rule != "memory_bound"} == rules
    said = {each.rule: each.advice + each.reason for each in conclusions.suggestions}
    if "host_memory_bound" in rules:
        assert "Instead of 64.0 GiB, ask for --mem=4G, or by CPU --mem-per-cpu=256M." in said["host_memory_bound"]
        assert "used at most 2.5 GiB. About 1 in 100 such jobs needs more than 4 GiB." in said["host_memory_bound"]


def test_a_job_out_of_host_memory_is_told_how_much_its_family_needed(reported: Any) -> None:
    job = with_host(reported.contexts["balanced"], state="OUT_OF_MEMORY", host_mem_alloc_mib=2048.0)
    more = dataclasses.replace(OPTIONS[0], size=8192.0, given=2048.0, highest=4096.0, option="--mem=8G")
    for options, said in (
        ((more,), "(--mem=8G, or by CPU --mem-per-cpu=512M)"),
        ((), "(--mem, --mem-per-cpu, or --mem-per-gpu)"),
    ):
        [advice] = [
            each.advice
            for each in conclude(facts_of(dataclasses.replace(job, host=options))).suggestions
            if each.rule == "host_memory_full"
        ]
        assert said in advice
