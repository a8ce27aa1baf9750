"""The command line of almanac-pack, the items that it lists, and the lines that the user reads.

Items are scripts by their place in the list, or indices of a sweep or of a job array. Slurm tells an array task its own
index, the step, and the smallest and largest index that it scheduled. Of --array=0-99:2 the largest is 98 (seen on
22.05, 24.11, and 26.05), so the last array task runs 98 and 99; with --items 0-98 it runs 98 alone.
"""

from __future__ import annotations

import getopt
import os
import re
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from almanac.units import printable
from slurm_hooks.packing.job import number_of

if TYPE_CHECKING:
    from advisor.packing.shares import Objective


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
class PackOptions:
    """The user's choices. One of scripts and command is empty. memory_mib: () is the default, (0,) no limit."""

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


def parse_options(argv: Sequence[str]) -> PackOptions:
    """Parse almanac-pack's arguments. Raises ValueError, naming the wrong option. Ends the process after --help."""
    try:
        pairs, words = getopt.getopt(list(argv), "hn:", _LONG)
    except getopt.GetoptError as error:
        raise ValueError(str(error)) from None
    values = dict(pairs)
    if {"-h", "--help"} & values.keys():
        sys.stdout.write(f"{USAGE}\n")
        sys.exit(0)
    has_command = len(words) < len(argv) and argv[len(argv) - len(words) - 1] == "--"
    return _options(values, tuple(words), has_command)


_LONG = (
    "help", "items=", "shares=", "search=", "progress=", "deadline=", "memory=", "output=", "grace=", "no-mps",
)  # fmt: skip


def _options(values: dict[str, str], words: tuple[str, ...], has_command: bool) -> PackOptions:
    if not words:
        raise ValueError("no command" if has_command else "no scripts, and no -- COMMAND")
    if "--items" in values and not has_command:
        raise ValueError("--items needs -- COMMAND: a list of scripts has no items")
    tasks = _tasks(values.get("-n", "2"))
    return PackOptions(
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


def read_options(argv: Sequence[str]) -> PackOptions:
    """Read the options. Ends the process with status 2 if they are wrong, and after --help: nothing is started then."""
    try:
        return parse_options(argv)
    except ValueError as error:
        sys.stderr.write(f"almanac-pack: {error}\n{USAGE}\n")
        sys.exit(WRONG_USAGE)


MOST_ITEMS = 100_000
PLACE = "{}"


@dataclass(frozen=True)
class Item:
    """One task of the list. index: of the script, or of the sweep."""

    index: int
    argv: tuple[str, ...]
    is_of_sweep: bool


def items_of(options: PackOptions, environ: Mapping[str, str]) -> list[Item]:
    """List the tasks to run. Raises ValueError if the job array or --items is wrong, saying how."""
    if options.scripts:
        return [Item(number, (script,), False) for number, script in enumerate(options.scripts)]
    return [
        Item(index, tuple(word.replace(PLACE, str(index)) for word in options.command), True)
        for index in indices_of(options.items, environ)
    ]


def indices_of(text: str, environ: Mapping[str, str]) -> list[int]:
    wanted = parse_indices(text) if text else None
    task = number_of(environ, "SLURM_ARRAY_TASK_ID")
    if task is None:
        if wanted is None:
            raise ValueError("no items: give --items, such as --items 0-9, or submit a job array")
        return wanted
    step, end = _step_and_end(environ)
    if wanted is not None and end is not None and max(wanted) >= end:
        raise ValueError(f"--items goes to {max(wanted)}, but the array's tasks run the items up to {end - 1}")
    own = range(task, task + step)
    return list(own) if wanted is None else [index for index in wanted if index in own]


def _step_and_end(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """Items of each array task, and the first index after the last item of all; None where Slurm does not say."""
    first, last, step, count = (
        number_of(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "STEP", "COUNT")
    )
    if step is None or step <= 1:
        return 1, None if last is None else last + 1
    if first is None or last is None or count is None or first + (count - 1) * step != last:
        raise ValueError("the array has several ranges and a step; expected one range, such as --array=0-99:2")
    return step, last + step


def parse_indices(text: str) -> list[int]:
    """The numbers of "0-9", "0-99:5", or "1,4,7-9", each once, in this order. Raises ValueError."""
    found: dict[int, None] = {}
    for term in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", term)
        if not match or (match[3] and not int(match[3])):
            raise ValueError(f"--items is {text!r}, expected numbers such as 0-99, 0-99:5, or 1,4,7")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        if not numbers or len(numbers) + len(found) > MOST_ITEMS:
            raise ValueError(f"--items is {text!r}, expected 1 to {MOST_ITEMS:,} numbers in rising ranges")
        found |= dict.fromkeys(numbers)
    return list(found)


WAIT_S = 1.0


def say(text: str) -> None:
    """One line on standard error, without control characters. A full disk, or a pipe that nobody reads, loses it."""
    line = f"almanac-pack: {printable(text, 500)}\n".encode("utf-8", "replace")
    try:
        if select.select([], [2], [], WAIT_S)[1]:
            os.write(2, line)
    except OSError:
        return
