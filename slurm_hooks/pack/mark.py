"""The word that almanac-pack adds to its job's comment: the job's figures are those of several tasks on each GPU.

Without it, later advice would take the memory and activity of several tasks for those of one. It is an extra: where
Slurm refuses or does not answer, the job stays unmarked, and nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence

WORD = b"almanac:packed"
COMMAND_S = 60.0
"""After so long a command is given up. Nothing waits for it."""
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
    """What names this job alone; b"" without one.

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
    """Standard output; b"" where the command fails or takes too long. Raises OSError where it cannot be started."""
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
