"""Packing advice in words: the one place for `advise`, the prompt, and reports."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from advisor.packing import decide as reasons
from advisor.packing.decide import PackingAdvice, PackingFamily, Range
from almanac.units import counted, format_gib, printable, span_text

NAME_WIDTH = 20
USUAL_TASKS = 2
"""Tasks on each GPU, if almanac-pack has no -n."""
_NUMBERS = {2: "two", 3: "three", 4: "four"}


def packing_sentence(advice: PackingAdvice) -> str:
    """Return the advice and its gain, one sentence without the command; "" if nothing is advised."""
    if not advice.is_advised or advice.gain is None:
        return ""
    gain = f"{_range(advice.gain)} times the work per GPU-hour ({counted(advice.runs, 'run')})"
    if advice.is_with_itself:
        many = _NUMBERS[advice.tasks]
        return f"Pack {many} on one GPU: each likely {_range(advice.speeds[0])} of its speed, {gain}."
    first, second = (_range(each) for each in advice.speeds)
    return f"Share a GPU with {named(advice.members[1])}: speeds {first} and {second}, {gain}."


def packing_headline(advice: PackingAdvice) -> str:
    """Return the advice in a few words; "" if nothing is advised.

    For example, "two of these can share a GPU (1.20 to 1.60 times the work)".
    """
    if not advice.is_advised or advice.gain is None:
        return ""
    whom = f"{_NUMBERS[advice.tasks]} of these can share a GPU"
    if not advice.is_with_itself:
        whom = f"can share a GPU with {named(advice.members[1])}"
    return f"{whom} ({_range(advice.gain)} times the work)"


def packing_evidence(advice: PackingAdvice) -> str:
    """Return the members' joint need of a GPU, and the effect on their run time; "" if that is not known."""
    demand, said = advice.demand, []
    if demand is not None:
        said.append(
            f"Together they need about {demand.sm:.0%} of a GPU's multiprocessors and {demand.dram:.0%} of its memory "
            "bandwidth."
        )
    if advice.needed_mib is not None and advice.usable_mib is not None and advice.risk:
        many = "pairs" if advice.tasks == USUAL_TASKS else f"groups of {_NUMBERS[advice.tasks]}"
        said.append(
            f"About 1 in {1 / advice.risk:.0f} such {many} needs more than {format_gib(advice.needed_mib)} of its "
            f"memory; {format_gib(advice.usable_mib)} can be used."
        )
    return " ".join([*said, packing_time(advice)]).rstrip()


def packing_time(advice: PackingAdvice) -> str:
    """Return how much longer a run may take next to the others, and what to do; "" if nothing is advised."""
    if not advice.is_advised:
        return ""
    longer = math.ceil(10 / min(each.low for each in advice.speeds) - 1e-6) / 10
    return f"With MPS, each may need up to {longer:.1f} times its run time: raise --time."


def packing_command(advice: PackingAdvice, is_array: bool = True) -> str:
    """Return the command to use; "" if nothing is advised. is_array: the runs are tasks of a job array.

    An array needs the step: without it, each array task has one item and the GPU to itself.
    """
    if not advice.is_advised:
        return ""
    if not advice.is_with_itself:
        return "almanac-pack a.sh b.sh"
    program = "almanac-pack" if advice.tasks == USUAL_TASKS else f"almanac-pack -n {advice.tasks}"
    return f"--array=A-B:{advice.tasks} and {program} -- CMD {{}}" if is_array else f"{program} --items A-B -- CMD {{}}"


def packing_lines(advice: PackingAdvice, width: int = 80, indent: str = "", is_array: bool = True) -> list[str]:
    """The sentence, the command, and the run time in lines of at most `width` columns; empty without advice."""
    if not advice.is_advised:
        return []
    inner = f"{indent}  "
    sentence = textwrap.wrap(
        packing_sentence(advice), width, initial_indent=indent, subsequent_indent=inner, break_on_hyphens=False
    )
    return [*sentence, f"{inner}Use: {packing_command(advice, is_array)}", f"{inner}{packing_time(advice)}"]


def named(family: PackingFamily, width: int = NAME_WIDTH) -> str:
    """The family's name in quotes, cut, without control characters."""
    return f'"{printable(family.name_key, width)}"'


def why_silent(advice: PackingAdvice) -> str:
    """Say why these do not share a GPU, one sentence; "" if they do."""
    rules = advice.rules
    if advice.reason == reasons.MEMORY and advice.needed_mib is not None and advice.usable_mib is not None:
        return (
            f"Packing: {_NUMBERS[advice.tasks]} runs may need {format_gib(advice.needed_mib)} of the "
            f"{format_gib(advice.usable_mib)} of a GPU that can be used."
        )
    if advice.reason == reasons.LITTLE_GAIN and advice.gain is not None:
        return (
            f"Packing: two runs may do only {advice.gain.low:.2f} times the work per GPU-hour; "
            f"{rules.min_gain:.2f} are needed."
        )
    said = {
        reasons.OTHER_USER: "jobs of different users never share a GPU",
        reasons.NO_GPU: "the job asks for no GPU",
        reasons.SEVERAL_NODES: "only jobs on one node share GPUs",
        reasons.UNEQUAL_GPUS: "the jobs have different numbers of GPUs",
        reasons.SEVERAL_GPUS: "almanac-pack gives each task one GPU, and the job has several",
        reasons.ON_MIG: "MIG slices are not shared further",
        reasons.UNKNOWN_GPU: "the GPU's model or memory is unknown, or not that of your runs",
        reasons.OLD_GPU: "no advice for GPUs older than Volta (compute capability below 7.0)",
        reasons.OTHER_GPU: "the jobs run on different GPU models",
        reasons.PREALLOCATED: "your runs reserve the GPU's memory at their start",
        reasons.TOO_FEW_RUNS: f"{advice.runs} of the {rules.min_runs} measured runs needed (SM and DRAM activity)",
        reasons.THIN_COVERAGE: f"less than {rules.min_coverage:.0%} of the activity samples are known",
        reasons.NO_BOUND: f"no memory bound for {_NUMBERS[advice.tasks]} runs together yet",
    }.get(advice.reason, "")
    return f"Packing: {said}." if said else ""


def packing_table(advice: PackingAdvice, is_array: bool = True) -> dict[str, Any]:
    """Return all that the advice rests on, for JSON. is_array: as in packing_command."""
    return {
        "reason": advice.reason,
        "is_advised": advice.is_advised,
        "tasks": advice.tasks,
        "command": packing_command(advice, is_array) or None,
        "speeds": [each._asdict() for each in advice.speeds],
        "gain": advice.gain._asdict() if advice.gain else None,
        "demand": advice.demand._asdict() if advice.demand else None,
        "needed_mib": advice.needed_mib,
        "usable_mib": advice.usable_mib,
        "risk": advice.risk,
        "runs": advice.runs,
        "rules": dataclasses.asdict(advice.rules),
        "members": [_member(each) for each in advice.members],
    }


def _member(family: PackingFamily) -> dict[str, Any]:
    demand = family.demand
    return {
        "name_key": family.name_key,
        "gpu_count": family.gpu_count,
        "runs": family.runs,
        "demand": demand._asdict() if demand else None,
        "coverage": family.coverage if family.coverage == family.coverage else None,
        "bound_mib": {str(tasks): mib for tasks, mib in family.bounds_mib.items()},
        "gpu_model": family.gpu_model,
        "capacity_mib": family.capacity_mib,
        "is_preallocated": family.is_preallocated,
        "is_on_mig": family.is_on_mig,
    }


def _range(both: Range) -> str:
    """Such as 0.80 to 0.95, rounded outwards; one number where both ends are equal."""
    low = f"{math.floor(both.low * 100 + 1e-6) / 100:.2f}"
    high = f"{math.ceil(both.high * 100 - 1e-6) / 100:.2f}"
    return span_text(low, high)


def packing_words(advice: PackingAdvice | None, is_array: bool) -> dict[str, str]:
    """Words by name, without control characters; "" without advice. is_array: whether the job is of a job array."""
    if advice is None or not advice.is_advised:
        return dict.fromkeys(("packing_headline", "packing", "packing_evidence"), "")
    return {
        "packing_headline": packing_headline(advice),
        "packing": f"{packing_sentence(advice)} Use: {packing_command(advice, is_array)}",
        "packing_evidence": packing_evidence(advice),
    }
