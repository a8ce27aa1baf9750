"""The process that calls NVML, and its parent's side of it. A call of a broken driver may never return.

The parent asks with a line, and the reader answers with a line of JSON. A reader that does not answer in time is
killed; while the kernel cannot end it, no second one starts, since that would hang in the same place.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_S = 5.0
START_S = 60.0
"""Timeout of the start: without persistence mode, the driver takes seconds to set up each GPU for NVML."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0
"""Between starts that fail; each one doubles it."""
LOOK_AGAIN_S = 300.0
"""A reader with a lost GPU ends after this time, so that the next one finds the GPU if it is back."""
_MOST_BYTES = 4 << 20
_PROGRAM = "import sys; sys.path[:] = {path!r}; from telemetry.collector.reader import main; main()"


@dataclass
class ReaderProcess:
    """A reader, started when it is needed. options: of `main`. indices: of GPUs by UUID, across readers.

    gpm_off_file: made when GPM is switched off, so that the next collector does not try it again.
    fault: why the last sample is missing; "" if there is one. starts: how many readers there were.
    """

    options: dict[str, Any]
    answer_s: float = ANSWER_S
    start_s: float = START_S
    look_again_s: float = LOOK_AGAIN_S
    pause_s: float = _FIRST_PAUSE_S
    indices: dict[str, int] = field(default_factory=dict)
    has_gpm: bool = True
    gpm_off_file: Path | None = None
    fault: str = ""
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _started_s: float = 0
    _paused_until_s: float = 0
    _failures: int = 0

    def sample(self) -> dict[str, Any] | None:
        """Return the reader's answer; None without one, and `fault` says why."""
        try:
            process = self._running()
            answer = self._exchange(process, self.answer_s, asks=True)
        except _NoAnswerError as error:
            self.fault = str(error)
            self._end()
            return None
        self.indices.update(answer["indices"])
        self.fault, self._failures = "", 0
        if answer["lost"] and time.monotonic() - self._started_s > self.look_again_s:
            self._end()
        return answer

    def close(self) -> None:
        """End the reader."""
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """Raises _NoAnswerError if there is none, and none can start now."""
        now_s = time.monotonic()
        if self._process is not None and self._process.returncode is None and self._process.poll() is None:
            if self._started_s:
                return self._process
            raise _NoAnswerError("the kernel cannot end the last reader: a call into the driver hangs")
        if now_s < self._paused_until_s:
            raise _NoAnswerError(self.fault)
        code = _PROGRAM.format(path=sys.path)
        options = {**self.options, "indices": self.indices, "gpm": self.has_gpm}
        self._process = subprocess.Popen(
            [sys.executable, *_FLAGS, "-c", code, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.starts += 1
        self._started_s = now_s
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._exchange(self._process, self.start_s, asks=False)
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], limit_s: float, *, asks: bool) -> dict[str, Any]:
        """Ask, and return the answer. Raises _NoAnswerError."""
        assert process.stdin is not None and process.stdout is not None
        if asks:
            with contextlib.suppress(OSError):  # it has ended: so does its output
                process.stdin.write(b"\n")
                process.stdin.flush()
        text, deadline_s = b"", time.monotonic() + limit_s
        while not text.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise _NoAnswerError(f"the reader did not answer within {limit_s:g} s")
            part = process.stdout.read(65536)
            text += part or b""
            if part == b"" or len(text) > _MOST_BYTES:
                self._pause()
                raise _NoAnswerError("the reader ended")
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            raise _NoAnswerError("the reader's answer cannot be read") from None
        if harm := answer.get("harm"):
            self.has_gpm = False
            with contextlib.suppress(OSError):
                if self.gpm_off_file:
                    self.gpm_off_file.touch()
            raise _NoAnswerError(f"GPM is off from now on: {harm}")
        if error := answer.get("error"):
            self._pause()
            raise _NoAnswerError(str(error))
        return answer

    def _pause(self) -> None:
        pause_s = min(self.pause_s * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 10)
        self._paused_until_s = time.monotonic() + pause_s

    def _end(self) -> None:
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()
        self._started_s = 0
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
            self._process = None


class _NoAnswerError(Exception):
    """No sample now; the message says why."""


_FLAGS = ["-BIS"] if sys.flags.no_site else ["-BI"]


def main() -> None:
    """Run the reader. The first argument has its options as JSON: host, mapping_dir, prolog_dir, indices, gpm."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    from telemetry.collector import jobs as slurm_jobs
    from telemetry.collector import nvml

    given = json.loads(sys.argv[1])
    try:
        reader = nvml.NvmlReader(given["indices"], has_gpm=given["gpm"])
        mapping_dir, prolog_dir = (given[name] and Path(given[name]) for name in ("mapping_dir", "prolog_dir"))
        jobs = slurm_jobs.GpuJobs(given["host"], mapping_dir, prolog_dir)
        _answer({"ready": True})
        while sys.stdin.buffer.readline():
            jobs.refresh()
            readings = [_packed(reading, reader, jobs) for reading in reader.sample()]
            _answer({"gpus": readings, "lost": reader.lost, "xids": reader.xids(), "indices": reader.indices})
    except nvml.DriverGoneError as error:
        _answer({"error": f"NVML: {error}"})
    except nvml.GpmHarmError as error:
        _answer({"harm": str(error)})


def _packed(reading: Any, reader: Any, jobs: Any) -> dict[str, Any]:
    gpu = reading.gpu
    found = jobs.of(gpu.index, gpu.uuid, reading.mig) or jobs.of_processes(reader.processes(reading))
    xid = {"uuid": gpu.uuid} if gpu.sends_xids else {}
    return {"labels": reading.labels, "values": reading.values, "jobs": found, **xid}


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
