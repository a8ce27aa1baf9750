"""almanac-restart: run a command in a job, and move the job to the next GPU type when its memory runs out.

It fails open: whatever goes wrong here, the command runs on and its exit code stays. It writes only lines to standard
error that begin with "almanac-restart:".
"""

from __future__ import annotations

import getopt
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from advisor.memory.restart import Destination, RestartJob, next_type, why_never
from almanac.tres import gpu_types
from almanac.units import parse_time_limit, printable
from slurm.commands import SlurmCommands
from slurm.releases import release_of
from slurm_hooks.restart import job as slurm_job
from slurm_hooks.restart.job import Run, ShownJob, SiteFacts, read_site, running_job
from slurm_hooks.restart.watch import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    Command,
    FileOutput,
    IterationFile,
    MemoryWatch,
    PipeOutput,
    end_like,
    limit_s,
    read_memory,
    watched_output,
)
from slurm_hooks.submit.sbatch_almanac import initial_environment

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
class RestartOptions:
    """The user's choices. signal: 0 with "none"; None: no early restart."""

    command: tuple[str, ...]
    signal: int | None = None
    grace_s: float = 120.0
    wanted: tuple[str, ...] = ()
    most_restarts: int = 3
    run_time_s: float | None = None
    memory_file: str = ""
    poll_s: float = 10.0
    is_dry_run: bool = False


def parse_options(argv: Sequence[str]) -> RestartOptions:
    """Parse the wrapper's arguments. Raises ValueError, naming the wrong option."""
    try:
        values, command = getopt.getopt(list(argv), "", _LONG)
    except getopt.GetoptError as error:
        raise ValueError(str(error)) from None
    if not command:
        raise ValueError("no command")
    return _options(tuple(command), dict(values))


_LONG = ("signal=", "grace=", "next=", "most-restarts=", "run-time=", "memory-file=", "poll=", "dry-run")


def _options(command: tuple[str, ...], values: dict[str, str]) -> RestartOptions:
    types = tuple(name.removeprefix("gpu:").removesuffix(":1") for name in values.get("--next", "").split(",") if name)
    return RestartOptions(
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


def read_options(argv: Sequence[str]) -> RestartOptions:
    """Read the options. Ends the process after --help, and with status 2 if they are wrong: nothing is started then."""
    if argv[:1] in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n")
        sys.exit(0)
    try:
        return parse_options(argv)
    except ValueError as error:
        sys.stderr.write(f"almanac-restart: {error}\n{USAGE}\n")
        sys.exit(WRONG_USAGE)


COMMAND_S = 10.0
"""Timeout of a command of Slurm or nvidia-smi."""


def say(text: str) -> None:
    """One line on standard error; the command's own output is not touched."""
    line = f"almanac-restart: {printable(text, 500)}\n".encode("utf-8", "replace")
    try:
        os.write(2, line)
    except OSError:
        return


@dataclass(frozen=True)
class Plan:
    """The job as it was at the start, and its destination."""

    job_id: str
    job: RestartJob
    site: SiteFacts
    destination: Destination


class Session:
    """One run of the wrapper. run: commands; environ: of the job; uid: its user; clock: seconds, monotonic."""

    def __init__(
        self,
        options: RestartOptions,
        run: Run,
        environ: Mapping[str, str],
        uid: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._run, self._environ, self._uid, self._clock = options, run, environ, uid, clock
        self._start_s = clock()

    def plan(self) -> Plan | None:
        """Plan the moves of this job; None, after saying why, if it stays."""
        job_id = self._environ.get("SLURM_JOB_ID", "")
        if not (job_id.isascii() and job_id.isdecimal()):
            say("no restarts: not in a Slurm job")
            return None
        settings = self._text("scontrol", "show", "config")
        job = running_job(ShownJob(self._shown(job_id)), self._uid, self._appends(settings))
        release = release_of("".join(re.findall(r"(?m)^SLURM_VERSION\s*=(.*)$", settings)))
        why = why_never(job, release, self._options.most_restarts)
        if why:
            say(f"no restarts: {why}")
            return None
        site = read_site(self._environ, self._uid, int(time.time()))
        plan = Plan(job_id, job, site, self._destination(job, site))
        if plan.destination.why_not:
            say(f"no restarts: {plan.destination.why_not}")
            return None
        return plan

    def _destination(self, job: RestartJob, site: SiteFacts) -> Destination:
        partition = self._environ.get("SLURM_JOB_PARTITION", "")
        where = ["-p", partition] if partition else []
        listing = self._text("sinfo", "-h", "-r", "-o", "%G", *where).splitlines()
        existing = {name for gres in listing for name in gpu_types(gres) if name}
        return next_type(job, site.capacities_mib, existing, self._options.wanted)

    def _text(self, *argv: str) -> str:
        """Raises CommandError."""
        done = self._run(argv)
        return done.stdout.decode("utf-8", "replace") if not done.code else ""

    def _shown(self, job_id: str) -> str:
        return self._text("scontrol", "-d", "-o", "show", "job", job_id)

    def _appends(self, settings: str) -> bool:
        """Return True if a restart keeps the output: sbatch's --open-mode, else the site's JobFileAppend."""
        mode = self._environ.get("SLURM_OPEN_MODE", "")
        if mode:
            return mode.startswith("a")
        return re.search(r"(?m)^JobFileAppend\s*=\s*1\s*$", settings) is not None

    def watch(self, plan: Plan) -> MemoryWatch:
        run_time = plan.site.run_time(self._options.run_time_s, limit_s(self._environ))
        iterations = IterationFile(self._options.memory_file) if self._options.memory_file else None
        return MemoryWatch(
            lambda: read_memory(self._run, self._environ), run_time, plan.site.peak_mib or None, iterations
        )

    def since_start_s(self) -> float:
        return self._clock() - self._start_s

    def move(self, plan: Plan, why: str) -> bool:
        """Restart the job on the next type, looked up again; whether it is queued again. Raises CommandError."""
        shown, target = ShownJob(self._shown(plan.job_id)), self._destination(plan.job, plan.site)
        has_changed = running_job(shown, self._uid, plan.job.appends_output) != plan.job
        if target.why_not or has_changed:
            say(f"{why}; the job is not moved: {target.why_not or 'its options changed since it started'}")
            return False
        text = f"{why}; moving job {plan.job_id} from gpu:{plan.job.gpu_type} to gpu:{target.gpu_type}"
        if self._options.is_dry_run:
            say(f"{text}: not done (--dry-run)")
            return False
        say(f"{text}; it starts again after Slurm's requeue delay, about 2 min")
        done = slurm_job.move(shown, shown.changed(target.gpu_type), self._run)
        if not done.is_requeued:
            say(f"Slurm did not requeue the job: {done.why}")
        elif not done.is_changed:
            say(f"the job is queued again, but for the same GPU type: {done.why}")
        return done.is_requeued


def supervise(command: Command, output: FileOutput | PipeOutput, session: Session, options: RestartOptions) -> int:
    """Wait for the command; its exit code. Moves the job on the way, or at the end."""
    plan: Plan | None = None
    watch: MemoryWatch | None = None
    try:
        plan = session.plan()
        if plan is not None and options.signal is not None:
            watch = session.watch(plan)
    except Exception as error:
        say(f"no restarts: {error}")
    pause_s = options.poll_s
    while (code := command.wait(pause_s if watch else 3600.0)) is None:
        if plan is None or watch is None:
            continue
        try:
            outgrown = watch.look(session.since_start_s())
        except Exception as error:
            say(f"no early restarts: {error}")
            watch = None
            continue
        if outgrown is not None:
            code = leave_early(command, session, plan, options, outgrown)
            watch = None
            if code is not None:
                return code
    if code != 0 and plan is not None:
        try:
            if output.ran_out():
                session.move(plan, f"out of GPU memory after {session.since_start_s():.0f} s")
        except Exception as error:
            say(f"the job is not moved: {error}")
    elif isinstance(output, PipeOutput):
        output.ran_out()  # passes on the rest
    return code


def leave_early(command: Command, session: Session, plan: Plan, options: RestartOptions, why: str) -> int | None:
    """Have a checkpoint written, then move the job. The command's exit code; None if it still runs."""
    if options.is_dry_run:
        say(f"the memory grows too fast: {why}: not restarted (--dry-run)")
        return None
    code: int | None = None
    if options.signal:
        say(f"the memory grows too fast: {why}; signal {options.signal} sent, waiting {options.grace_s:g} s at most")
        command.send(options.signal)
        code = command.wait(options.grace_s)
    try:
        session.move(plan, f"the memory grows too fast: {why}")
    except Exception as error:
        say(f"the job is not moved: {error}")
    return code


def main() -> NoReturn:
    options = read_options(sys.argv[1:])
    environ = initial_environment()
    if options.memory_file:
        environ[b"ALMANAC_MEMORY_FILE"] = os.fsencode(options.memory_file)
    # First, so that commands of ours start in the time that the command runs.
    output: FileOutput | PipeOutput | None = None
    try:
        output = watched_output()
    except OSError:
        output = None
    try:
        command = Command(options.command, environ, output.command_fd if output else None)
    except OSError as error:
        say(f"cannot run {options.command[0]}: {error.strerror}")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    if output is None:
        end_like(_waited(command))
    output.started()
    commands = SlurmCommands(timeout_s=COMMAND_S)
    session = Session(options, commands.run, os.environ, os.getuid())
    end_like(supervise(command, output, session, options))


def _waited(command: Command) -> int:
    while (code := command.wait(3600.0)) is None:
        pass
    return code
