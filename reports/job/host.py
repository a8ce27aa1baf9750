"""Facts and words of a job's CPUs, host memory, and nodes, compared with the size of the nodes.

A size that the store does not know (`node_cpu_count` and its like) makes its facts unknown, and their rules silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from almanac.records import HostOption
from almanac.units import counted, format_count, format_gib
from reports.job.evidence import JobContext, busy_cpus_text, percent
from reports.job.rules import Fact

SPARE_MEMORY = 1.25
"""Host memory for fewer nodes: the peak times this. job_defense_shield fills 80% of a node (safety_fraction 0.2)."""


def host_facts(context: JobContext) -> dict[str, Fact]:
    """CPUs and host memory, of all nodes together; per GPU, of the GPUs that the job was given."""
    job, efficiency, gpus = context.job, context.cpu_efficiency, context.gpu_count
    alloc_mib, peak_mib = (_ratio(job[name], 1) for name in ("host_mem_alloc_mib", "host_mem_peak_mib"))
    cpus = job["cpu_count"]
    share = peak_mib / alloc_mib if alloc_mib and peak_mib is not None else None
    busy = efficiency * cpus if efficiency is not None and cpus else None
    parts = _node_facts(context, busy)
    return {
        "is_cpu_only": context.is_cpu_only,
        "nodes": job["node_count"],
        "cpus": cpus,
        "cpu_efficiency": efficiency,
        "busy_cpus": busy,
        "cpu_hours": None if context.elapsed_s is None or not cpus else cpus * context.elapsed_s / 3600,
        "host_mem_alloc_mib": alloc_mib,
        "host_mem_peak_mib": peak_mib,
        "host_mem_share": share,
        "host_mem_unused_mib": max(1 - share, 0.0) * alloc_mib if share is not None and alloc_mib else None,
        "cpus_per_gpu": cpus / gpus if cpus and gpus else None,
        "host_mem_per_gpu_mib": alloc_mib / gpus if alloc_mib and gpus else None,
        "queue_wait_s": context.queue_wait_s,
        "mem_next_share": _next_share(context, "memory", parts["host_mem_part"]),
        "cpus_next_share": _next_share(context, "cpus", parts["cpu_part"]),
        **parts,
    }


def _next_share(context: JobContext, resource: str, part: Fact) -> float | None:
    """The advised size as a share of what the job had; None if less would serve nobody.

    part: of the job's share of its nodes, by its GPUs. A job that holds no more than this keeps no GPU from others.
    """
    option = context.host_option(resource)
    is_needed_by_others = not context.gpu_count or (isinstance(part, int | float) and part > 1)
    return option.size / option.given if option and is_needed_by_others else None


def _option_words(context: JobContext) -> dict[str, str]:
    memory, cpus = context.host_option("memory"), context.host_option("cpus")
    any_option = "--mem, --mem-per-cpu, or --mem-per-gpu"
    forms = _memory_forms(memory, context.job["cpu_count"]) if memory else ""
    words = {"more_mem": forms if memory and memory.size > memory.given else any_option, "mem_forms": forms}
    for name, option in (("mem", memory), ("cpus", cpus)):
        words |= {f"{name}_option": option.option if option else "", f"{name}_evidence": _evidence(option)}
    return words


def _memory_forms(memory: HostOption, cpus: int | None) -> str:
    """The option by node, and by CPU: a job that asks by CPU must not add the other. Slurm's record names neither."""
    if not cpus:
        return memory.option
    mib = math.ceil(memory.size / cpus)
    return f"{memory.option}, or by CPU --mem-per-cpu={f'{mib // 1024}G' if mib % 1024 == 0 else f'{mib}M'}"


def _evidence(option: HostOption | None) -> str:
    """The runs behind an option and its risk, in two sentences; "" without one."""
    if option is None:
        return ""
    if option.resource == "memory":
        need, size = f"used at most {format_gib(option.highest)}", f"{option.size / 1024:g} GiB"
    else:
        need = f"kept at most {busy_cpus_text(option.highest)} CPUs busy on average"
        size = counted(int(option.size), "CPU")
    one_in = format_count(max(int(1 / option.risk + 1e-9), 1))
    return f"Your last {option.runs} runs of this job {need}. About 1 in {one_in} such jobs needs more than {size}."


def _node_facts(context: JobContext, busy: float | None) -> dict[str, Fact]:
    """Compare the request with the size of its nodes. busy: CPUs, on average.

    A part of 1 is what a job of its GPUs, or without any of its CPUs, leaves to others in proportion: cpu_part,
    host_mem_part of what it was given, cpu_used_part, host_mem_used_part of what it used. nodes_spare: nodes more than
    are enough for its GPUs, CPUs, and host memory. core_efficiency: as if one busy thread kept its core busy.
    """
    job, gpus, efficiency = context.job, context.gpu_count, context.cpu_efficiency
    cpus, node_cpus, node_mib, threads = (
        job[name] for name in ("cpu_count", "node_cpu_count", "node_memory_mib", "node_threads")
    )
    part = _ratio(gpus, job["node_gpu_count"]) if gpus else _ratio(cpus, node_cpus)
    asked = min(cpus, job["cpu_count_req"] or cpus) if cpus else None
    enough = _nodes_enough(context)
    return {
        "nodes_enough": enough,
        "nodes_spare": None if enough is None else (job["node_count"] or 0) - enough,
        "cpu_part": _ratio(asked, part and node_cpus and part * node_cpus),
        "cpu_used_part": _ratio(busy, part and node_cpus and part * node_cpus),
        "host_mem_part": _ratio(job["host_mem_alloc_mib"], part and node_mib and part * node_mib),
        "host_mem_used_part": _ratio(job["host_mem_peak_mib"], part and node_mib and part * node_mib),
        "core_efficiency": None if efficiency is None or not threads else min(efficiency * threads, 1.0),
        "cores": _ratio(cpus, threads),
    }


def _ratio(amount: float | None, of: float | None) -> float | None:
    """None also for what a file can hold and no job has: NaN, and infinity."""
    return ratio if amount is not None and of and math.isfinite(ratio := amount / of) else None


def _nodes_enough(context: JobContext) -> int | None:
    """The fewest of its nodes that hold its GPUs, its CPUs, and its host memory: measured, else what it was given."""
    job, gpus = context.job, context.gpu_count
    peak_mib, alloc_mib = (_ratio(job[name], 1) for name in ("host_mem_peak_mib", "host_mem_alloc_mib"))
    memory_mib = alloc_mib if peak_mib is None else min(SPARE_MEMORY * peak_mib, alloc_mib or math.inf)
    needed = [_ratio(job["cpu_count"], job["node_cpu_count"]), _ratio(memory_mib, job["node_memory_mib"])]
    if gpus:
        needed.append(_ratio(gpus, job["node_gpu_count"]))
    known = [each for each in needed if each is not None]
    return max(math.ceil(max(known)), 1) if len(known) == len(needed) else None


def host_words(context: JobContext, values: Mapping[str, Fact]) -> dict[str, str]:
    """Words of the rules; "" for a figure that is not known."""
    job, enough, busy, per_gpu = context.job, values["nodes_enough"], values["busy_cpus"], values["cpus_per_gpu"]
    node_gpus, node_cpus, node_mib = job["node_gpu_count"], job["node_cpu_count"], job["node_memory_mib"]
    sizes = [counted(node_gpus, "GPU")] if node_gpus else []
    sizes += [counted(node_cpus, "CPU")] if node_cpus else []
    sizes += [f"{node_mib / 1024:,.0f} GiB of memory"] if node_mib else []
    gib = node_mib // node_gpus // 1024 if node_mib and node_gpus else 0
    names = ("host_mem_alloc", "host_mem_peak", "host_mem_unused", "host_mem_per_gpu")
    return {
        **_option_words(context),
        "cpu_efficiency": percent(values["cpu_efficiency"]),
        "busy_cpus": busy_cpus_text(busy) if isinstance(busy, float) else "",
        "cpus": counted(job["cpu_count"] or 0, "CPU"),
        "nodes": counted(job["node_count"] or 0, "node"),
        **{name: format_gib(mib) if isinstance(mib := values[f"{name}_mib"], int | float) else "" for name in names},
        "host_mem_share": percent(values["host_mem_share"]),
        "cpus_per_gpu": f"{per_gpu:.3g}" if isinstance(per_gpu, float) else "",
        "nodes_enough": counted(enough, "node") if isinstance(enough, int) else "",
        "nodes_option": f"--nodes={enough}" if isinstance(enough, int) else "",
        "gpus_option": f"--gpus={context.gpu_count}",
        "node_size": f"{', '.join(sizes[:-1])}{',' * (len(sizes) > 2)}{' and ' * (len(sizes) > 1)}{sizes[-1]}"
        if sizes
        else "",
        "cpus_of_gpu": str(node_cpus // node_gpus) if node_cpus and node_gpus else "",
        "host_mem_of_gpu": f"{gib} GiB" if gib else "",
        "host_mem_option": f"--mem-per-gpu={gib}G" if gib else "",
    }
