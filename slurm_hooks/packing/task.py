"""Tasks on the GPUs of a job: environment, CPUs, output, and process of each, and the failures on one GPU."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_hooks.packing.ending import children_of
from slurm_hooks.packing.job import TASK_MARK
from slurm_hooks.packing.mps import TOGETHER_S, Failure, Mps, innocent, names_fault
from slurm_hooks.packing.options import Item

TAIL_BYTES = 65_536


def output_path(pattern: str, item: Item, slot: int, environ: Mapping[str, str]) -> str:
    """The pattern with its words replaced. A name from outside never adds a folder."""
    job = environ.get("SLURM_JOB_ID", "")
    array = environ.get("SLURM_ARRAY_JOB_ID", "") or job
    is_array_sweep = item.is_of_sweep and "SLURM_ARRAY_JOB_ID" in environ
    if not pattern:
        pattern = "slurm-%A_%a.out" if is_array_sweep else "slurm-%j_%a.out" if job else "pack-%a.out"
    words = {
        "a": str(item.index),
        "A": array,
        "j": job,
        "s": str(slot),
        "x": environ.get("SLURM_JOB_NAME", ""),
        "%": "%",
    }
    safe = {letter: re.sub(r"[/\0]|^\.+", "_", word) for letter, word in words.items()}
    return re.sub("%([aAjsx%])", lambda match: safe[match[1]], pattern)


@dataclass(frozen=True)
class Output:
    """An open file. start: its length before this task. is_shared: it is the job's own output, as a pipe can be."""

    path: str
    fd: int
    start: int

    def tail(self) -> str:
        """The end of what the task wrote; "" where that cannot be read."""
        try:
            with open(self.path, "rb", opener=_quiet) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self.start, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def fault(self) -> str:
        """Return why some of the output may be lost; "" if it is on the disk."""
        try:
            if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                return ""
            os.fsync(self.fd)
            space = os.fstatvfs(self.fd)
            return "" if space.f_bavail or not space.f_blocks else "No space left on device"  # FUSE may count nothing
        except OSError as error:
            return error.strerror or str(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _quiet(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def open_output(path: str, must_append: bool) -> Output:
    """Open a task's output file, and empty it unless must_append. Raises OSError.

    A path that is the job's own output is continued, because the last array index names both files.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        status = os.fstat(fd)
        number = _of_job(status)
        if number is not None:  # with its offset: a file that is not open for appending would be written over
            os.close(fd)
            fd = os.dup(number)
        elif not must_append and stat.S_ISREG(status.st_mode):
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
        return Output(path, fd, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise


def _of_job(status: os.stat_result) -> int | None:
    """The number under which this process has the file as its own output; None if it has not."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None


NOT_FOUND, NOT_EXECUTABLE, NO_OUTPUT = 127, 126, 1


@dataclass(frozen=True)
class Slot:
    """A place for one task at a time. number: of all slots; position: among those of its GPU; cpus: empty: any."""

    number: int
    gpu: int
    position: int
    cpus: frozenset[int]
    threads: int


@dataclass
class Running:
    """A task that was started. pids: all that were seen of it, for MPS's log. is_client: it uses MPS."""

    item: Item
    slot: Slot
    process: subprocess.Popen[bytes]
    output: Output
    is_client: bool
    began_s: float = field(default_factory=time.monotonic)
    pids: set[int] = field(default_factory=set)

    def look(self) -> None:
        self.pids |= children_of(self.process.pid)

    def send(self, number: int) -> None:
        """Send a signal to the task's process group, unless the task's own process has ended."""
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, number)
            except OSError:
                return


def task_environ(
    environ: Mapping[bytes, bytes], item: Item, slot: Slot, gpu: Mapping[bytes, bytes], token: str
) -> dict[bytes, bytes]:
    """The job's environment with what is particular to this task. gpu: variables of its GPU."""
    changed = dict(environ)
    changed.setdefault(b"OMP_NUM_THREADS", b"%d" % slot.threads)
    changed |= gpu
    changed |= {
        b"ALMANAC_PACK_ITEM": b"%d" % item.index,
        b"ALMANAC_PACK_SLOT": b"%d" % slot.number,
        TASK_MARK.encode(): token.encode(),
    }
    if item.is_of_sweep:
        changed[b"SLURM_ARRAY_TASK_ID"] = b"%d" % item.index
    return changed


def command_of(item: Item) -> list[str]:
    """The arguments to run. A script of the list is one file, which need not be executable, as for sbatch."""
    if item.is_of_sweep:
        return list(item.argv)
    path = item.argv[0]
    if os.path.isfile(path) and "/" not in path:  # noqa: PTH113 - a name, which Path would normalize
        path = f"./{path}"
    if os.access(path, os.X_OK) or not os.path.isfile(path):  # noqa: PTH113 - as above
        return [path]
    return [*_interpreter(path), path]


def _interpreter(path: str) -> list[str]:
    """Of its first line, as Linux reads it; [] without one."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a name, as above
            line = file.readline(256)
    except OSError:
        return []
    return os.fsdecode(line[2:].strip()).split(None, 1) if line.startswith(b"#!") else []


def start_process(
    argv: Sequence[str], environ: Mapping[bytes, bytes], output: Output, cpus: frozenset[int], mask: set[int]
) -> subprocess.Popen[bytes]:
    """Start a task as the leader of its own process group. mask: signals that it has blocked. Raises OSError."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if cpus:
            with contextlib.suppress(OSError):  # none of them may be there any more
                os.sched_setaffinity(0, cpus)

    return subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=output.fd, stderr=output.fd, preexec_fn=prepare,
        process_group=0,
    )  # fmt: skip


def exit_code(returncode: int) -> int:
    """Return the exit code as a shell counts it: for a signal, 128 + its number."""
    return 128 - returncode if returncode < 0 else returncode


@dataclass(frozen=True)
class Failed:
    """A client of MPS that ended with a code other than 0."""

    item: Item
    failure: Failure
    ended_s: float


@dataclass
class PackGpu:
    """A GPU of a run and its tasks. mps: its daemon; None: tasks share by time-slicing.

    alone: tasks to run again with the GPU to themselves.
    """

    name: str
    slots: Sequence[Slot]
    mps: Mps | None = None
    running: dict[int, Running] = field(default_factory=dict)
    alone: deque[Item] = field(default_factory=deque)
    is_alone: bool = False
    failed: list[Failed] = field(default_factory=list)
    has_lost_mps: bool = False
    _log_offsets: dict[str, int] = field(default_factory=dict)

    def free_slots(self) -> list[Slot]:
        """Return the places where the next tasks of the list can start."""
        if self.is_alone or self.alone or any(names_fault(each.failure.text) for each in self.failed):
            return []
        return [slot for slot in self.slots if slot.number not in self.running]

    def next_alone(self) -> Item | None:
        return self.alone.popleft() if self.alone and not self.running else None

    def note_failure(self, run: Running, text: str) -> None:
        self.failed.append(Failed(run.item, Failure(text, frozenset(run.pids)), time.monotonic()))

    def innocent(self) -> tuple[list[Item], str]:
        """Tasks that a common fault ended without their doing, and why; [] while that cannot be known yet."""
        if not self.failed:
            return [], ""
        first_s = self.failed[0].ended_s
        if self.running and time.monotonic() - first_s < TOGETHER_S:
            return [], ""
        group = [each for each in self.failed if each.ended_s - first_s <= TOGETHER_S]
        self.failed = self.failed[len(group) :]
        log = self.mps.new_log(self._log_offsets) if self.mps else ""
        is_lost = self.has_lost_mps or (self.mps is not None and not self.mps.is_alive())
        found, why = innocent([each.failure for each in group], log, is_lost)
        return [group[number].item for number in found], why
