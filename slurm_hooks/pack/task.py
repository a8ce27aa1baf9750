"""One task: its environment, its CPUs, its output, and its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_hooks.pack.items import Item
from slurm_hooks.pack.output import Output
from slurm_hooks.pack.processes import TASK_MARK, children_of

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
        """To the task's process group, while the task's own process is there."""
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
    """Raises OSError. mask: blocked signals of the task. It leads a process group of its own."""

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
    """As a shell counts it: 128 + the signal that ended it."""
    return 128 - returncode if returncode < 0 else returncode
