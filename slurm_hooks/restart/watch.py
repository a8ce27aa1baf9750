"""The wrapped command, watched without being touched: its GPU memory, its error output, and its end.

The memory is that of the job's one GPU or MIG instance, as nvidia-smi shows it. The command gets the caller's own
environment and signals. If standard error is a file, as in most batch jobs, the command writes to it directly, and the
added text is read when it ends. Otherwise its error output goes through a pipe and is passed on byte for byte.

The job may note its iterations for the predictor on allocator requests (Algorithm 1): one line per iteration, appended
when it ends, with four numbers, separated by tabs or spaces:

    iteration   last iteration   MiB requested in it   MiB held for it, at its peak

The last iteration is "-" if the program does not know it. torch_memory.py writes such a file for PyTorch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn
from xml.etree import ElementTree

from advisor.memory.restart import AllocatorWatch, ExpectedEnd, GrowthWatch, Iteration
from almanac.errors import CommandError
from almanac.files import open_plain
from slurm_hooks.restart.job import Run

_LISTED_GPU = re.compile(r"GPU [0-9]+: .*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")
_LISTED_MIG = re.compile(r"\s+MIG .*Device +([0-9]+): \(UUID: (MIG-[0-9A-Za-z/-]+)\)")
_MIB = re.compile(r"([0-9]+) MiB")


@dataclass(frozen=True)
class GpuMemory:
    """MiB. capacity_mib: used + free, which on a MIG instance is less than its name says."""

    used_mib: float
    capacity_mib: float


def read_memory(run: Run, environ: Mapping[str, str]) -> GpuMemory | None:
    """Read the memory of the job's GPU or MIG instance; None unless there is exactly one, and nvidia-smi shows it.

    If Slurm confines the job to its devices, nvidia-smi shows only those; otherwise CUDA_VISIBLE_DEVICES names it.
    """
    try:
        shown = run(["nvidia-smi", "-q", "-x"])
        listed = run(["nvidia-smi", "-L"])
        if shown.code or listed.code:
            return None
        devices = _devices(ElementTree.fromstring(shown.stdout), listed.stdout.decode("utf-8", "replace"))
    except (CommandError, ElementTree.ParseError):
        return None
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    if named in devices:
        return devices[named]
    return next(iter(devices.values())) if len(devices) == 1 else _by_index(devices, named)


def _by_index(devices: Mapping[str, GpuMemory | None], named: str) -> GpuMemory | None:
    """By an index among whole GPUs; MIG instances have no index of their own there."""
    names = list(devices)
    is_plain = named.isascii() and named.isdecimal() and not any(name.startswith("MIG-") for name in names)
    return devices[names[int(named)]] if is_plain and int(named) < len(names) else None


def _devices(log: ElementTree.Element, listing: str) -> dict[str, GpuMemory | None]:
    """By UUID; of a GPU with instances, the instances. Both listings have the GPUs in the same order."""
    uuids: list[dict[str, str]] = []
    for line in listing.splitlines():
        if _LISTED_GPU.match(line):
            uuids.append({})
        elif (match := _LISTED_MIG.match(line)) and uuids:
            uuids[-1][match[1]] = match[2]
    found: dict[str, GpuMemory | None] = {}
    for gpu, instances in zip(log.iter("gpu"), uuids, strict=False):
        slices = gpu.findall("mig_devices/mig_device")
        for each in slices:
            uuid = instances.get((each.findtext("index") or "").strip())
            if uuid:
                found[uuid] = _memory_of(each)
        if not slices and not instances:
            found[(gpu.findtext("uuid") or "").strip()] = _memory_of(gpu)
    return found


def _memory_of(device: ElementTree.Element) -> GpuMemory | None:
    values = []
    for name in ("used", "free"):
        match = _MIB.fullmatch((device.findtext(f"fb_memory_usage/{name}") or "").strip())
        values.append(float(match[1]) if match else math.nan)
    used, free = values
    return GpuMemory(used, used + free) if used + free > 0 else None


MOST_TEXT = 1 << 20


class IterationFile:
    """The file as it grows. Missing, malformed, and other than regular files have no iterations."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new(self) -> list[tuple[Iteration, float | None]]:
        """Iterations added since the last call, each with the number of the last one."""
        try:
            with open_plain(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    return []
                file.seek(self._offset)
                text = file.read(MOST_TEXT)
        except OSError:
            return []
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        return [found for line in lines if (found := _parsed(line)) is not None]


def _parsed(line: bytes) -> tuple[Iteration, float | None] | None:
    words = line.decode("ascii", "replace").split()
    try:
        last = None if words[1] == "-" else float(words[1])
        requested, held = float(words[2]), float(words[3])
    except (IndexError, ValueError):
        return None
    if not (math.isfinite(requested) and math.isfinite(held) and requested > 0 and held > 0):
        return None
    return Iteration(requested, held), last


class MemoryWatch:
    """look() at the memory at a time since the start; both predictors may say that the job outgrows it."""

    def __init__(
        self,
        read: Callable[[], GpuMemory | None],
        run_time: ExpectedEnd,
        family_peak_mib: float | None,
        iterations: IterationFile | None,
    ) -> None:
        self._read, self._run_time, self._family, self._iterations = read, run_time, family_peak_mib, iterations
        self._growth: GrowthWatch | None = None
        self._allocator: AllocatorWatch | None = None

    def look(self, since_start_s: float) -> str | None:
        """Return why the job is to restart early, with figures, or None."""
        memory = self._read()
        if memory is None:
            return None
        if self._growth is None or self._allocator is None:
            self._growth = GrowthWatch(memory.capacity_mib, self._run_time, self._family)
            self._allocator = AllocatorWatch(memory.capacity_mib, self._family)
        full_s = self._growth.observe(since_start_s, memory.used_mib)
        use = f"{memory.used_mib:.0f} of {memory.capacity_mib:.0f} MiB used"
        if full_s is not None:
            return f"{use}, full in about {max(0.0, full_s - since_start_s):.0f} s"
        for iteration, last in self._iterations.new() if self._iterations else ():
            if self._allocator.observe(iteration, last):
                return f"{use}, more than the capacity predicted from the allocator's requests"
        return None


def limit_s(environ: Mapping[str, str]) -> float | None:
    """The job's time limit by SLURM_JOB_START_TIME and SLURM_JOB_END_TIME; None where they are not set."""
    try:
        length = float(environ["SLURM_JOB_END_TIME"]) - float(environ["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        return None
    return length if 0 < length < 1e9 else None


OUT_OF_MEMORY = re.compile(
    rb"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    rb"|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED|cupy\.cuda\.memory\.OutOfMemoryError"
    rb"|RESOURCE_EXHAUSTED: (?:Out of memory|OOM|Failed to allocate)|OOM when allocating tensor"
    rb"|CUDA error: out of memory|CUDA runtime error.{0,40}out of memory|hipErrorOutOfMemory|HIP out of memory"
)
"""Messages of PyTorch, CUDA, cuDNN, cuBLAS, CuPy, JAX and TensorFlow (XLA), and HIP, as their sources write them."""
MOST_BYTES = 4 << 20
"""Bytes at the end of the error output that are searched."""
OVERLAP = 200
BLOCK = 65_536
LAST_S = 2.0
"""Seconds for which the pipe is read on after the command's end: a process that it left behind may hold it."""


def names_out_of_memory(text: bytes) -> bool:
    return OUT_OF_MEMORY.search(text) is not None


class FileOutput:
    """Standard error is a file. command_fd: where the command writes; None: what it inherits."""

    command_fd: int | None = None

    def __init__(self, fd: int = 2) -> None:
        self._path = f"/proc/self/fd/{fd}"
        self._start = os.stat(self._path).st_size  # noqa: PTH116

    def started(self) -> None: ...

    def ran_out(self) -> bool:
        """Return True if the text added since names an out-of-memory end. False if it cannot be read."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            start = self._start if size >= self._start else 0
            file.seek(max(start, size - MOST_BYTES))
            return names_out_of_memory(file.read(MOST_BYTES))
        return False


class PipeOutput:
    """Standard error is a terminal, a pipe or a socket: a thread passes the bytes on."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._read, self._write = os.pipe()
        self.command_fd: int | None = self._write
        self._seen = b""
        self._found = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def started(self) -> None:
        """Close the pipe's write end, which the command now holds, and start to pass its output on."""
        os.close(self._write)
        self._thread.start()

    def ran_out(self) -> bool:
        self._thread.join(LAST_S)
        return self._found

    def _pass_on(self) -> None:
        is_open = True
        while block := os.read(self._read, BLOCK):
            text = self._seen + block
            self._found = self._found or names_out_of_memory(text)
            self._seen = text[-OVERLAP:]
            while block and is_open:
                try:
                    block = block[os.write(self._fd, block) :]
                except OSError:  # nobody reads any more; the command must not block
                    is_open = False


def watched_output(fd: int = 2) -> FileOutput | PipeOutput:
    """Return the watcher that fits the descriptor: for a file, or for anything else. Raises OSError if it is closed."""
    return FileOutput(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else PipeOutput(fd)


FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH, signal.SIGXCPU,
)  # fmt: skip
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Command:
    """A running command. Signals to this process are kept back and handed to it by wait()."""

    def __init__(self, argv: Sequence[str], environ: Mapping[bytes, bytes], stderr: int | None) -> None:
        """Start the command. Raises OSError if it cannot be started."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
        try:
            self._process = subprocess.Popen(argv, env=environ, stderr=stderr, preexec_fn=self._restore_signals)
        except BaseException:
            self._restore_signals()
            raise

    def _restore_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, seconds: float) -> int | None:
        """Return Popen.returncode, or None if it still runs after so many seconds."""
        until = time.monotonic() + seconds
        while self._process.poll() is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            got = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, min(left, 1.0))
            if got is not None and got.si_signo != signal.SIGCHLD:
                self.send(got.si_signo)
        return self._process.returncode

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def end_like(code: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """End this process as the command ended: with its exit code, or by the signal that ended it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    leave(128 - code if code < 0 else code)
