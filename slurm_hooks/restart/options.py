"""The command line of almanac-restart."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from almanac.units import parse_time_limit

USAGE = """usage: almanac-restart [OPTIONS] -- COMMAND [ARGUMENT...]

Run COMMAND in a job with one GPU. When COMMAND runs out of GPU memory, requeue the job on the next larger
GPU type: the job id and the output file stay. Needs Slurm 24.11 and sbatch --requeue --open-mode=append.

  --signal NAME        restart early, too: when memory grows too fast, send this signal to COMMAND, so
                       that it writes a checkpoint and ends; "none" restarts without a signal
  --grace SECONDS      time for the checkpoint (default 120)
  --next TYPE,...      GPU types to go to, in this order, such as gpu:2g.20gb; default: the site's tiers
  --most-restarts N    restart at most N times (default 3)
  --run-time TIME      how long COMMAND takes, as sbatch --time; default: the published prediction
  --memory-file FILE   iterations that COMMAND writes, for the predictor on allocator requests
  --poll SECONDS       time between two looks at the memory (default 10)
  --dry-run            say what would be done, and leave the job alone
  --help               show this text"""
WRONG_USAGE = 2


@dataclass(frozen=True)
class Options:
    """What the user asked for. signal: 0 with "none"; None: no early restart."""

    command: tuple[str, ...]
    signal: int | None = None
    grace_s: float = 120.0
    wanted: tuple[str, ...] = ()
    most_restarts: int = 3
    run_time_s: float | None = None
    memory_file: str = ""
    poll_s: float = 10.0
    is_dry_run: bool = False


def parse_options(argv: Sequence[str]) -> Options:
    """Raises ValueError, saying which option is wrong."""
    values: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name not in _NAMES:
            raise ValueError(f"unknown option {name!r}")
        if name == "--dry-run":
            value = "yes"
        elif not equals:
            if not rest:
                raise ValueError(f"{name} needs a value")
            value = rest.pop(0)
        values[name] = value
    command = tuple(rest[1:] if rest[:1] == ["--"] else rest)
    if not command:
        raise ValueError("no command")
    return _options(command, values)


_NAMES = (
    "--signal", "--grace", "--next", "--most-restarts", "--run-time", "--memory-file", "--poll", "--dry-run"
)  # fmt: skip


def _options(command: tuple[str, ...], values: dict[str, str]) -> Options:
    types = tuple(name.removeprefix("gpu:").removesuffix(":1") for name in values.get("--next", "").split(",") if name)
    return Options(
        command=command,
        signal=_signal(values["--signal"]) if "--signal" in values else None,
        grace_s=_number(values, "--grace", 120.0, 0.0, 86_400.0),
        wanted=types,
        most_restarts=int(_number(values, "--most-restarts", 3, 0, 100)),
        run_time_s=parse_time_limit(values["--run-time"]) if "--run-time" in values else None,
        memory_file=values.get("--memory-file", ""),
        poll_s=_number(values, "--poll", 10.0, 0.1, 3600.0),
        is_dry_run="--dry-run" in values,
    )


def _number(values: dict[str, str], name: str, default: float, least: float, most: float) -> float:
    try:
        number = float(values.get(name, default))
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise ValueError(f"{name} is {values[name]!r}, expected a number from {least:g} to {most:g}")
    return number


def _signal(name: str) -> int:
    """The number of USR1, SIGUSR1, or 10; 0 of none."""
    if name.lower() == "none":
        return 0
    word = name.upper().removeprefix("SIG")
    numbers = {each.name.removeprefix("SIG"): each.value for each in signal.Signals}
    number = int(word) if word.isascii() and word.isdecimal() else numbers.get(word, -1)
    if number not in numbers.values():
        raise ValueError(f"--signal is {name!r}, expected a name such as USR1, or none")
    return number


def read_options(argv: Sequence[str]) -> Options:
    """Ends the process after --help, or with status 2 where the options are wrong: the command is not started then."""
    if argv[:1] in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n")
        sys.exit(0)
    try:
        return parse_options(argv)
    except ValueError as error:
        sys.stderr.write(f"almanac-restart: {error}\n{USAGE}\n")
        sys.exit(WRONG_USAGE)
