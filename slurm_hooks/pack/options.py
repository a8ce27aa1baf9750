"""The command line of almanac-pack."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from advisor.decisions.pack_shares import Objective

USAGE = """usage: almanac-pack [OPTIONS] SCRIPT SCRIPT...
       almanac-pack [OPTIONS] -- COMMAND [ARGUMENT...]

Run several tasks on each GPU of a job: a list of scripts, or one command for each item. {} in an argument is
the item. In a job array with a step (--array=0-99:2), each array task runs as many items as the step says.

  -n N                 tasks on each GPU at a time, 1 to 4 (default 2)
  --items LIST         the items, such as 0-99, 0-99:5, or 1,4,7; in an array, all items of the whole array
  --shares P,P         percent of the GPU that each of the N tasks may use; default: all compete
  --search OBJECTIVE   search the shares between tasks: jct (mean time), makespan, or deadline
  --progress PATTERN   file where each task writes its steps, with the words of --output; tasks find its path in
                       ALMANAC_PACK_PROGRESS; default: a file of this run
  --deadline TIME      when each task is to end, such as 2026-12-24T18:00; default: SLURM_JOB_END_TIME
  --memory SIZE,SIZE   GPU memory that each of the N tasks may use, such as 20G,12G; one size counts for all;
                       default: the published bound of this job's name; "none": no limit
  --output PATTERN     file of each task's output: %a the item, %A the array's job id, %j the job id, %x the
                       job name, %s the slot; default slurm-%j_%a.out, in an array slurm-%A_%a.out
  --grace SECONDS      time that tasks get to end after scancel or the time limit (default 15)
  --no-mps             do not use NVIDIA's MPS
  --help               show this text"""
WRONG_USAGE = 2
MOST_TASKS = 4
OBJECTIVES: tuple[Objective, ...] = ("jct", "deadline", "makespan")
_UNITS_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Options:
    """What the user asked for. One of scripts and command is empty. memory_mib: () is the default, (0,) no limit."""

    scripts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    items: str = ""
    tasks_per_gpu: int = 2
    shares: tuple[int, ...] = ()
    memory_mib: tuple[int, ...] = ()
    output: str = ""
    grace_s: float = 15.0
    wants_mps: bool = True
    search: Objective | None = None
    progress: str = ""
    deadline_s: float | None = None


def parse_options(argv: Sequence[str]) -> Options:
    """Raises ValueError, saying which option is wrong. Ends the process after --help."""
    values: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name in ("--help", "-h"):
            sys.stdout.write(f"{USAGE}\n")
            sys.exit(0)
        if re.fullmatch("-n[0-9]+", name) and not equals:
            name, value = "-n", name[2:]
        elif name not in _NAMES:
            raise ValueError(f"unknown option {name!r}")
        elif name == "--no-mps" and equals:
            raise ValueError(f"--no-mps takes no value, but has {value!r}")
        elif name != "--no-mps" and not equals:
            if not rest:
                raise ValueError(f"{name} needs a value")
            value = rest.pop(0)
        values[name] = value
    return _options(values, rest)


_NAMES = (
    "-n", "--items", "--shares", "--search", "--progress", "--deadline", "--memory", "--output", "--grace", "--no-mps",
)  # fmt: skip


def _options(values: dict[str, str], rest: list[str]) -> Options:
    has_command = rest[:1] == ["--"]
    words = tuple(rest[1:] if has_command else rest)
    if not words:
        raise ValueError("no command" if has_command else "no scripts, and no -- COMMAND")
    if "--items" in values and not has_command:
        raise ValueError("--items needs -- COMMAND: a list of scripts has no items")
    tasks = _tasks(values.get("-n", "2"))
    return Options(
        scripts=() if has_command else words,
        command=words if has_command else (),
        items=values.get("--items", ""),
        tasks_per_gpu=tasks,
        shares=_shares(values["--shares"], tasks) if "--shares" in values else (),
        memory_mib=_memory(values["--memory"], tasks) if "--memory" in values else (),
        output=values.get("--output", ""),
        grace_s=_seconds(values.get("--grace", "15")),
        wants_mps="--no-mps" not in values,
        search=_objective(values, tasks, 0 if has_command else len(words)),
        progress=values.get("--progress", ""),
        deadline_s=_deadline_s(values["--deadline"]) if "--deadline" in values else None,
    )


def _tasks(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_TASKS):
        raise ValueError(f"-n is {text!r}, expected a number from 1 to {MOST_TASKS}")
    return int(text)


def _shares(text: str, tasks: int) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) != tasks or not all(re.fullmatch("[0-9]{1,3}", word) and 1 <= int(word) <= 100 for word in words):
        raise ValueError(f"--shares is {text!r}, expected {tasks} percentages from 1 to 100, such as 60,40")
    return tuple(int(word) for word in words)


def _objective(values: dict[str, str], tasks: int, scripts: int) -> Objective | None:
    """scripts: 0 of a command. Tasks of one place must be alike: then a later one profits from what was measured."""
    name = values.get("--search")
    if name is None:
        if needing := [option for option in ("--progress", "--deadline") if option in values]:
            raise ValueError(f"{needing[0]} needs --search")
        return None
    if other := [option for option in ("--shares", "--no-mps") if option in values]:
        raise ValueError(f"--search and {other[0]} exclude each other")
    if tasks < 2 or scripts not in (0, tasks):
        raise ValueError(f"--search needs -n 2 or more, and one command or {tasks} scripts: it got -n {tasks}")
    for objective in OBJECTIVES:
        if name == objective:
            return objective
    raise ValueError(f"--search is {name!r}, expected {', '.join(OBJECTIVES)}")


def _deadline_s(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"--deadline is {text!r}, expected a time such as 2026-12-24T18:00") from None


def _memory(text: str, tasks: int) -> tuple[int, ...]:
    """MiB of each task; (0,) of "none"."""
    if text == "none":
        return (0,)
    sizes = [re.fullmatch("([0-9]{1,7})([MGT])(?:i?B)?", word) for word in text.split(",")]
    found = [int(size[1]) * _UNITS_MIB[size[2]] for size in sizes if size]
    if len(found) != len(sizes) or not all(found) or len(found) not in (1, tasks):
        raise ValueError(f"--memory is {text!r}, expected one size or {tasks}, such as 20G,12G, or none")
    return tuple(found * tasks if len(found) == 1 else found)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= 86_400:
        raise ValueError(f"--grace is {text!r}, expected a number of seconds from 0 to 86400")
    return number


def read_options(argv: Sequence[str]) -> Options:
    """Ends the process after --help, or with status 2 where the options are wrong: nothing is started then."""
    try:
        return parse_options(argv)
    except ValueError as error:
        sys.stderr.write(f"almanac-pack: {error}\n{USAGE}\n")
        sys.exit(WRONG_USAGE)
