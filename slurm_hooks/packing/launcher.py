"""almanac-pack: several tasks on each GPU of a job, each with its own output and exit code.

MPS is an extra: whatever goes wrong with it, the tasks run and share the GPU by time-slicing. The program itself writes
only lines to standard error that begin with "almanac-pack:".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from almanac.units import counted
from slurm_hooks.packing.ending import Watchdog, awaited, end_run
from slurm_hooks.packing.job import (
    FOLDER_PREFIX,
    abandoned_folders,
    allocated_cpus,
    cpu_parts,
    folder_path,
    folder_places,
    gpus_of,
    is_safe_place,
    is_slice,
    lock_folder,
    make_folder,
    new_token,
    number_of,
    threads_for,
    usable_cpus,
    why_not,
)
from slurm_hooks.packing.mps import PROGRAM, Mps
from slurm_hooks.packing.options import WRONG_USAGE, Item, PackOptions, items_of, read_options, say
from slurm_hooks.packing.run import PackRun
from slurm_hooks.packing.task import PackGpu, Slot, output_path
from slurm_hooks.submit.sbatch_almanac import initial_environment

if TYPE_CHECKING:
    from slurm_hooks.packing.share_search import TaskSearch


UNNAMED = "wrap"
"""Slurm's name of each job of sbatch --wrap that has none of its own, so the name says nothing about it."""


def make_gpus(names: Sequence[str], tasks_per_gpu: int, environ: Mapping[str, str]) -> list[PackGpu]:
    """Places for tasks, with disjoint CPUs. A MIG slice takes one task."""
    counts = [1 if is_slice(name) else tasks_per_gpu for name in names]
    cpus, allocated = usable_cpus(), allocated_cpus(environ)
    parts = cpu_parts(cpus, allocated, sum(counts))
    threads = threads_for(allocated, cpus, parts, sum(counts))
    gpus, number = [], 0
    for place, (name, count) in enumerate(zip(names, counts, strict=True)):
        slots = []
        for position in range(count):
            slots.append(Slot(number, place, position, parts[number] if parts else frozenset(), threads))
            number += 1
        gpus.append(PackGpu(name, slots))
    return gpus


def why_no_mps(options: PackOptions, gpus: Sequence[PackGpu], items: Sequence[Item], environ: Mapping[str, str]) -> str:
    """Return why tasks share by time-slicing, or do not share at all; "" to try MPS."""
    if any(is_slice(gpu.name) for gpu in gpus):
        return "MIG slices run one task each"
    if options.tasks_per_gpu == 1 or len(items) == 1:
        return "one task at a time"
    site_has_mps = [name for name in environ if name.startswith("CUDA_MPS_")]
    if site_has_mps:
        return f"no MPS of its own ({site_has_mps[0]} is set already)"
    if not options.wants_mps:
        return "time-slicing (--no-mps)"
    if shutil.which(PROGRAM, path=environ.get("PATH", "")) is None:
        return f"time-slicing ({PROGRAM} is not in PATH)"
    return ""


def find_folder(token: str, environ: Mapping[str, str]) -> str:
    """A path for the private folder where a file can be made now; "" without any."""
    for place in folder_places(environ.get("TMPDIR")):
        if is_safe_place(place):
            return folder_path(place, token)
    return ""


def remove_abandoned(environ: Mapping[bytes, bytes]) -> None:
    """End what earlier runs of this user left on this host, and remove their folders."""
    for place in folder_places(os.environ.get("TMPDIR")):
        for path in abandoned_folders(place):
            token = path.rpartition(FOLDER_PREFIX)[2]
            daemons = [Mps("0", str(gpu), token, environ) for gpu in sorted(Path(path).glob("gpu*"))]
            end_run(token, path, daemons, 0.0)
            say(f"removed {path}, which an earlier run had left")


def end_killed_run(token: str, path: str, daemons: Sequence[Mps], grace_s: float) -> None:
    """End the tasks of a killed run, for the watchdog.

    The lock keeps the user's next run from ending the tasks before their time is over.
    """
    with contextlib.suppress(OSError):
        lock_folder(path)
    end_run(token, path, daemons, grace_s)


def make_search(
    options: PackOptions, items: int, token: str, folder: str, environ: Mapping[str, str]
) -> TaskSearch | None:
    """The search that --search asks for, with what earlier jobs of this family measured."""
    if options.search is None:
        return None
    from slurm_hooks.packing.search_file import SearchFile, file_name, state_folder
    from slurm_hooks.packing.share_search import SearchGoal, TaskSearch

    def path_of(slot: Slot, item: Item) -> str:
        if options.progress:
            return output_path(options.progress, item, slot.number, environ)
        return f"{folder}/progress-{slot.number}-{item.index}"

    words = (*options.command, *options.scripts)
    parts = (environ.get("SLURM_JOB_PARTITION", ""), options.search, str(options.tasks_per_gpu), *words)
    place = state_folder(environ)
    name = environ.get("SLURM_JOB_NAME", "")
    file = SearchFile(place / file_name(name, parts), options.tasks_per_gpu) if place else None
    say(f"search for shares ({options.search}): {file.path if file else 'kept for this run only, without HOME'}")
    goal = SearchGoal(options.search, options.tasks_per_gpu, deadline_of(options, environ))
    return TaskSearch(goal, token.partition("-")[0] + token[-8:], items, path_of, file)


def deadline_of(options: PackOptions, environ: Mapping[str, str]) -> float | None:
    """Unix time: the one given, else the end of the job's time limit; None where Slurm does not say it."""
    return options.deadline_s or number_of(environ, "SLURM_JOB_END_TIME")


def limit_of(options: PackOptions, environ: Mapping[str, str]) -> Callable[[Slot], int | None]:
    """MiB of GPU memory for the task in a slot: what the user says, else the published bound of the job's name."""
    if options.memory_mib == (0,):
        return lambda slot: None
    if options.memory_mib:
        return lambda slot: options.memory_mib[slot.position]
    bound = None if environ.get("SLURM_JOB_NAME") == UNNAMED else published_bound(environ)
    if bound:
        say(
            f"each task may use {bound} MiB of GPU memory, the published bound of this job name; --memory none lifts it"
        )
    return lambda slot: bound


def published_bound(environ: Mapping[str, str]) -> int | None:
    """MiB, for jobs of this name with one GPU; None where nothing usable is published for this user."""
    import time

    from slurm_hooks.restart.job import read_site  # takes 0.05 s, and only MPS needs it

    try:
        peak_mib = read_site(environ, os.getuid(), int(time.time())).peak_mib
    except Exception as error:
        say(f"no published memory bound: {error}")
        return None
    return int(peak_mib) if peak_mib else None


def open_standard_files() -> None:
    """A file that is opened later must not become our output by its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main() -> NoReturn:
    open_standard_files()
    options = read_options(sys.argv[1:])
    environ = initial_environment()
    why = why_not(os.environ)
    if options.search == "deadline" and deadline_of(options, os.environ) is None:
        why = why or "--search deadline needs --deadline TIME: Slurm does not say when the job ends"
    items: list[Item] = []
    try:
        items = items_of(options, os.environ) if not why else []
    except ValueError as error:
        why = str(error)
    if why:
        say(f"nothing was started: {why}")
        sys.exit(WRONG_USAGE)
    if not items:
        say("none of the items is one of this array task")
        sys.exit(0)
    sys.exit(pack(options, items, environ))


def pack(options: PackOptions, items: Sequence[Item], environ: Mapping[bytes, bytes]) -> int:
    """Runs all; the job's exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, Linux keeps no exit codes
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited())
    gpus = make_gpus(gpus_of(os.environ), options.tasks_per_gpu, os.environ)
    why = why_no_mps(options, gpus, items, os.environ)
    token = new_token(os.environ.get("SLURM_JOB_ID", ""))
    path = "" if why else find_folder(token, os.environ)
    daemons = [Mps(gpu.name, f"{path}/gpu{place}", token, environ) for place, gpu in enumerate(gpus)] if path else []
    watchdog = _watchdog(lambda: end_killed_run(token, path, daemons, options.grace_s))
    has_folder = bool(path) and _make_folder(path, environ)
    at_a_time = min(len(items), sum(len(gpu.slots) for gpu in gpus))
    how = why or "MPS" if has_folder or why else "time-slicing"
    if how != "MPS" and (options.shares or any(options.memory_mib)):
        say("--shares and --memory have no effect without MPS")
    say(f"{counted(len(items), 'task')} on {counted(len(gpus), 'GPU')}, {at_a_time} at a time: {how}")
    search = make_search(options, len(items), token, path, os.environ) if has_folder else None
    if options.search and search is None:
        say("no search for shares: they need MPS")
    run = PackRun(
        items, gpus, environ, token=token, folder=path, mask={int(number) for number in mask},
        output_pattern=options.output, grace_s=options.grace_s,
        make_mps=lambda place: daemons[place] if has_folder else None,
        share_of=search.share_of if search else lambda slot: options.shares[slot.position] if options.shares else None,
        limit_mib=limit_of(options, os.environ) if has_folder else lambda slot: None, search=search,
    )  # fmt: skip
    code = run.run()
    if watchdog is not None:
        watchdog.dismiss()
    return code


def _watchdog(end: Callable[[], object]) -> Watchdog | None:
    try:
        return Watchdog(end)
    except OSError as error:
        say(f"no watchdog: {error.strerror}; after kill -9, tasks may be left")
        return None


def _make_folder(path: str, environ: Mapping[bytes, bytes]) -> bool:
    """Return True if there is a folder for MPS. Its lock lives as long as this process."""
    try:
        remove_abandoned(environ)
        make_folder(path)
    except OSError as error:
        say(f"no MPS: {path} cannot be made: {error.strerror}; tasks share the GPU by time-slicing")
        return False
    return True
