"""The job of a run: its GPUs and CPUs on this node, the mark in its comment, and the private folder of the run.

The comment gets the word almanac:packed, because later advice would take the memory and activity of several tasks for
those of one. If Slurm refuses or does not answer, the job silently stays unmarked. The folder has mode 0700 and a
random name, is locked while its run lives, and is removed afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import time
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path

TASK_MARK = "ALMANAC_PACK_TASK"
_TOPOLOGY = "/sys/devices/system/cpu"


def why_not(environ: Mapping[str, str]) -> str:
    """Return the reason that nothing can be packed here; "" without one."""
    inside = environ.get(TASK_MARK, "").partition("-")[0]  # of another job where a task has submitted this one
    if inside and inside == environ.get("SLURM_JOB_ID", "0"):
        return "it is in a task of almanac-pack; expected one almanac-pack for the job, with all tasks in its list"
    # A job that is submitted inside a step of several tasks inherits SLURM_STEP_NUM_TASKS, but not SLURM_NTASKS.
    if min(number_of(environ, name) or 1 for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")) > 1:
        return "srun started several copies of it; expected one: srun -n 1 almanac-pack"
    in_step = "SLURM_STEP_NUM_NODES" in environ
    nodes = number_of(environ, "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES") or 1
    if nodes > 1:
        return f"the job has {nodes} nodes; expected one: submit with -N 1, or use srun -N 1 -n 1 almanac-pack"
    if not gpus_of(environ):
        return "CUDA_VISIBLE_DEVICES names no GPU; expected one: submit with --gpus=1 or --gres=gpu:1"
    return ""


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number in an environment variable of Slurm; None if it is absent or not a number."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else None


def gpus_of(environ: Mapping[str, str]) -> list[str]:
    """Indices or UUIDs, as Slurm gave them; [] without GPUs (Slurm then says NoDevFiles, or nothing)."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return list(
        dict.fromkeys(
            name for name in names if (name.isascii() and name.isdecimal()) or name.startswith(("GPU-", "MIG-"))
        )
    )


def is_slice(gpu: str) -> bool:
    return gpu.startswith("MIG-")


def cpu_parts(cpus: Collection[int], allocated: int, parts: int) -> list[frozenset[int]]:
    """Disjoint parts of the job's CPUs, whole cores together where that is possible; [] where nobody may be pinned.

    cpus: those that this process may use. allocated: what Slurm says it gave. Without confinement a process may use
    the whole node, and pinning would put it on CPUs of other jobs.
    """
    if not cpus or len(cpus) < parts or (allocated and len(cpus) > allocated):
        return []
    ordered = sorted(cpus, key=lambda cpu: (_core(cpu), cpu))
    edges = [len(ordered) * number // parts for number in range(parts + 1)]
    return [frozenset(ordered[low:high]) for low, high in itertools.pairwise(edges)]


def _core(cpu: int) -> int:
    """The smallest CPU of the same core."""
    try:
        text = Path(f"{_TOPOLOGY}/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        return int(text.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def threads_for(allocated: int, cpus: Collection[int], parts: Sequence[frozenset[int]], slots: int) -> int:
    """CPUs of one task, at least 1."""
    if parts:
        return min(len(part) for part in parts)
    return max(1, (allocated or len(cpus)) // slots)


def allocated_cpus(environ: Mapping[str, str]) -> int:
    """0 where Slurm does not say."""
    return number_of(environ, "SLURM_CPUS_ON_NODE") or 0


def usable_cpus() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()


WORD = b"almanac:packed"
COMMAND_S = 60.0
"""Timeout of a command. Nothing waits for it."""
AFTER_KILL_S = 1.0
MOST_BYTES = 1 << 20
_NO_COMMENT = b"(null)"
_CHANGING = (b"SQUEUE_", b"SLURM_CLUSTERS")
"""Variables that change what squeue shows, or which cluster is asked."""


def mark_job(environ: Mapping[bytes, bytes]) -> Generator[None, None, None]:
    """Adds the word and keeps what the comment says. next() goes as far as it can without waiting; close() gives up."""
    try:
        job_id, name = environ.get(b"SLURM_JOB_ID", b""), job_name(environ)
        if name:
            kept = {key: value for key, value in environ.items() if not key.startswith(_CHANGING)}
            shown = yield from _output([b"squeue", b"-h", b"-j", name, b"-o", b"%A %k"], kept)
            comment = marked_comment(shown, job_id)
            if comment:
                yield from _output([b"scontrol", b"update", b"jobid=" + name, b"comment=" + comment], kept)
    except (OSError, ValueError):
        return


def job_name(environ: Mapping[bytes, bytes]) -> bytes:
    """Return the name of this job alone; b"" without one.

    The last task of an array has the array's own id for a job id, so an id alone would name all tasks. So it is with
    the components of a het job, which are not marked.
    """
    names = (b"SLURM_JOB_ID", b"SLURM_ARRAY_JOB_ID", b"SLURM_ARRAY_TASK_ID")
    job, array, task = (environ.get(name, b"") for name in names)
    name = array + b"_" + task if array else job
    return name if re.fullmatch(rb"[0-9]+(_[0-9]+)?", name) and b"SLURM_HET_SIZE" not in environ else b""


def marked_comment(shown: bytes, job_id: bytes) -> bytes:
    """The comment to set; b"": there is nothing to do, or what squeue shows (id and comment) is of another job."""
    shown_id, _, comment = shown.removesuffix(b"\n").partition(b" ")
    if shown_id != job_id or WORD in comment.split():
        return b""
    return WORD if comment in (b"", _NO_COMMENT) else comment + b" " + WORD


def _output(argv: Sequence[bytes], environ: Mapping[bytes, bytes]) -> Generator[None, None, bytes]:
    """Standard output; b"" if the command fails or takes too long. Raises OSError if it cannot be started."""
    with open(os.memfd_create("output"), "w+b") as output:  # noqa: PTH123 - of a descriptor
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, process_group=0
        )
        until = time.monotonic() + COMMAND_S
        try:
            while process.poll() is None and time.monotonic() < until:
                yield
        finally:
            _end(process)
        output.seek(0)
        return output.read(MOST_BYTES) if process.returncode == 0 else b""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(AFTER_KILL_S)


FOLDER_PREFIX = "almanac-pack-"
YOUNG_S = 60.0
MOST_PATH = 36
"""Length of a place whose pipes still have a path short enough for a Unix socket (107 bytes)."""


def folder_places(tmpdir: str | None) -> list[str]:
    """Return the parents that a folder may have: $TMPDIR if it is a short absolute path, then /tmp."""
    own = [tmpdir] if tmpdir and tmpdir.startswith("/") and len(os.fsencode(tmpdir)) <= MOST_PATH else []
    return list(dict.fromkeys([*own, "/tmp"]))


def is_safe_place(place: str) -> bool:
    """Return True if others cannot put a folder of theirs where ours is: neither in the place, nor in any folder above.

    Such are folders that only root and this user can change, and sticky ones such as /tmp.
    """
    try:
        folders = {str(each) for path in (place, os.path.realpath(place)) for each in [Path(path), *Path(path).parents]}
        return all(map(_is_closed, folders)) and os.access(place, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_closed(folder: str) -> bool:
    """Raises OSError."""
    status = os.stat(folder)  # noqa: PTH116 - as os.access above
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return not is_shared and status.st_uid in (0, os.getuid())


def new_token(job_id: str) -> str:
    """A name of the run that nobody can guess: its job's id ("0" outside Slurm), 8 digits of its host, 8 by chance."""
    return f"{job_id if job_id.isascii() and job_id.isdecimal() else 0}-{_host()}{os.urandom(4).hex()}"


def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def folder_path(place: str, token: str) -> str:
    return f"{place.rstrip('/')}/{FOLDER_PREFIX}{token}"


def make_folder(path: str) -> None:
    """Make the folder, and lock it. Raises OSError, also where the name is taken."""
    Path(path).mkdir(mode=0o700)
    lock_folder(path)


def lock_folder(path: str, *, must_wait: bool = True) -> int:
    """Lock the folder itself: a file in it could be removed as too old. Returns the descriptor; raises OSError.

    The lock ends with the process, however that ends. It is of this host, also where hosts share the folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if must_wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_folder(path: str) -> None:
    """The folder and all in it, if it is this user's own folder."""
    if _is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def abandoned_folders(place: str) -> Iterator[str]:
    """Yield this user's folders whose run on this host ended without removing them. Each is locked while yielded.

    Other users' folders are never opened.
    """
    try:
        names = os.listdir(place)  # noqa: PTH208 - names, not paths
    except OSError:
        return
    for name in names:
        path = f"{place.rstrip('/')}/{name}"
        if re.fullmatch(f"{FOLDER_PREFIX}[0-9]+-{_host()}[0-9a-f]{{8}}", name) and _is_own(path) and _is_old(path):
            try:
                fd = lock_folder(path, must_wait=False)
            except OSError:
                continue
            yield path
            os.close(fd)


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_old(path: str) -> bool:
    """A younger folder may be one that is not locked yet."""
    try:
        return time.time() - os.lstat(path).st_mtime > YOUNG_S
    except OSError:
        return False
