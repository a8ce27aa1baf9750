"""NVIDIA's MPS for one GPU: a control daemon of this user, and the faults that its logs tell of.

Each GPU has its own daemon and folder: after a fatal fault, a server refuses new clients on all its GPUs until the old
ones have ended. The daemon sees one GPU, which clients then know as 0, or by its UUID.

A fatal fault of one client ends the work of all clients on that GPU, and CUDA does not say whose fault it was. MPS's
logs differ between releases: only lines that speak of a fault, and the process ids in them, are used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from telemetry.health.errors import lost_context

DAEMON_MARK = "ALMANAC_PACK_DAEMON"
PROGRAM = "nvidia-cuda-mps-control"
START_S = 10.0
ASK_S = 3.0
QUIT_S = 2.0
LOGS = ("control.log", "server.log")
MOST_LOG_BYTES = 1 << 20


class MpsError(Exception):
    """MPS refused, or did not answer; the message says which."""


class MpsTimeoutError(MpsError):
    """MPS did not answer in time."""


@dataclass(frozen=True)
class Mps:
    """The daemon of one GPU. folder: its own. token: of this run. environ: of the job."""

    gpu: str
    folder: str
    token: str
    environ: Mapping[bytes, bytes]

    @property
    def pipes(self) -> str:
        return f"{self.folder}/pipe"

    @property
    def logs(self) -> str:
        return f"{self.folder}/log"

    def client_variables(self, share: int | None, limit_mib: int | None) -> dict[bytes, bytes]:
        """Variables that make a task a client of this daemon. share: percent; None: no limit."""
        variables = {
            b"CUDA_MPS_PIPE_DIRECTORY": os.fsencode(self.pipes),
            b"CUDA_MPS_LOG_DIRECTORY": os.fsencode(self.logs),
            b"CUDA_VISIBLE_DEVICES": self.gpu.encode() if self.gpu.startswith("GPU-") else b"0",
        }
        if share is not None:
            variables[b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = b"%d" % share
        if limit_mib:
            variables[b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = b"0=%dM" % limit_mib
        return variables

    def start(self) -> None:
        """Start the daemon and its server. Raises MpsError, or OSError where the folder cannot be written."""
        for path in (self.folder, self.pipes, self.logs):
            Path(path).mkdir(mode=0o700)
        self._run(["-d"], b"", START_S)
        try:
            self._start_server()
        except MpsError:
            with contextlib.suppress(MpsError):  # a server that comes late would keep an exclusive GPU
                self.quit()
            raise

    def _start_server(self) -> None:
        self.ask(f"start_server -uid {os.getuid()}", START_S)
        until = time.monotonic() + START_S
        while not self.servers():
            if time.monotonic() > until:
                raise MpsTimeoutError(f"its server did not start within {START_S:g} s{self._last_log_line()}")
            time.sleep(0.1)

    def servers(self) -> list[int]:
        return _numbers(self.ask("get_server_list"))

    def is_alive(self) -> bool:
        try:
            self.ask("get_server_list")
        except MpsError:
            return False
        return True

    def terminate_clients(self) -> None:
        """Ends the outstanding work of each client, so that the client can be killed. Raises MpsError.

        A client that has gone meanwhile, and so is refused, keeps nobody from the others.
        """
        refused: MpsError | None = None
        for server in self.servers():
            for client in _numbers(self.ask(f"get_client_list {server}")):
                try:
                    self.ask(f"terminate_client {server} {client}")
                except MpsTimeoutError:
                    raise
                except MpsError as error:
                    refused = error
        if refused is not None:
            raise refused

    def quit(self) -> None:
        """Stop the daemon. Raises MpsError if it does not answer."""
        self.ask(f"quit -t {QUIT_S:g}", QUIT_S + 1)

    def ask(self, command: str, seconds: float = ASK_S) -> str:
        """Send the daemon a command and return its answer. Raises MpsError."""
        return self._run([], f"{command}\n".encode(), seconds)

    def _run(self, arguments: list[str], stdin: bytes, seconds: float) -> str:
        program = shutil.which(PROGRAM, path=os.fsdecode(self.environ.get(b"PATH", b"")))
        if program is None:
            raise MpsError(f"{PROGRAM} is not in PATH")
        what = stdin.decode().strip() or " ".join(arguments)
        return _output(program, arguments, stdin, self._daemon_environ(), seconds, what)

    def _daemon_environ(self) -> dict[bytes, bytes]:
        return {
            **self.environ,
            b"CUDA_MPS_PIPE_DIRECTORY": os.fsencode(self.pipes),
            b"CUDA_MPS_LOG_DIRECTORY": os.fsencode(self.logs),
            b"CUDA_VISIBLE_DEVICES": self.gpu.encode(),
            DAEMON_MARK.encode(): self.token.encode(),
        }

    def new_log(self, offsets: dict[str, int]) -> str:
        """Return the lines of both logs since the last call with these offsets; "" without any."""
        text = ""
        for name in LOGS:
            with contextlib.suppress(OSError), Path(f"{self.logs}/{name}").open("rb") as file:
                file.seek(offsets.get(name, 0))
                text += file.read(MOST_LOG_BYTES).decode("utf-8", "replace") + "\n"
                offsets[name] = file.tell()
        return text

    def _last_log_line(self) -> str:
        lines = self.new_log({}).split("\n")
        lines = [line for line in lines if line.strip()]
        return f": {lines[-1]}" if lines else ""


def _output(
    program: str, arguments: list[str], stdin: bytes, environ: Mapping[bytes, bytes], seconds: float, what: str
) -> str:
    """Standard output of the control program. The output goes to a file: a daemon keeps a pipe open for ever."""
    reader, writer = os.memfd_create("mps", os.MFD_CLOEXEC), subprocess.PIPE
    try:
        process = subprocess.Popen(
            [program, *arguments], stdin=writer, stdout=reader, stderr=reader, env=environ, start_new_session=True,
            cwd="/", preexec_fn=_default_signals,
        )  # fmt: skip
        try:
            process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise MpsTimeoutError(f"{PROGRAM} ({what}) did not answer within {seconds:g} s") from None
        text = os.pread(reader, MOST_LOG_BYTES, 0).decode("utf-8", "replace")
    except OSError as error:
        raise MpsError(f"{PROGRAM} cannot be run: {error.strerror}") from None
    finally:
        os.close(reader)
    if process.returncode:
        said = f": {text.strip().splitlines()[-1]}" if text.strip() else ""
        raise MpsError(f"{PROGRAM} ({what}) failed with code {process.returncode}{said}")
    return text


def _default_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _numbers(text: str) -> list[int]:
    return [int(line) for line in text.split() if re.fullmatch("[1-9][0-9]{0,9}", line)]


TOGETHER_S = 10.0
"""Tasks that fail within so many seconds of each other may have ended by one fault."""
_ENDED_BY_MPS = re.compile(
    r"MPS_?CLIENT_?TERMINATED|MPS client has been terminated|MPS_?RPC_?FAILURE|MPS_?SERVER_?NOT_?READY"
    r"|MPS_?CONNECTION_?FAILED|(?:MPS RPC|connect to the MPS|MPS server is not ready)",
    re.IGNORECASE,
)
"""CUDA's words to a client whose server ended its work, or is not ready after a fault (errors 805, 806, 807, 810)."""
_STICKY = lost_context()
"""Faults after which a CUDA context is lost (errors 700 to 719)."""
_STAMP = re.compile(r"^\[[^\]]*\]")
_LOGGED = re.compile(r"^(?!.*on socket:).*(?<![a-z/])(?:fault|fatal|exception)", re.IGNORECASE)
"""Lines that speak of a fault. "Default" and the paths of sockets do not."""
_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,9}(?!\w|\.[0-9])")


@dataclass(frozen=True)
class Failure:
    """A task that ended with a code other than 0. text: the end of its output; pids: all of its processes seen."""

    text: str
    pids: frozenset[int]


def names_fault(text: str) -> bool:
    """Return True if a task's output names a fault that can end other tasks."""
    return bool(_ENDED_BY_MPS.search(text) or _STICKY.search(text))


def innocent(failures: Sequence[Failure], log: str, is_daemon_dead: bool) -> tuple[list[int], str]:
    """Return the tasks of one GPU, failed together, that should run again, and why; [] without a common fault.

    log: new lines of MPS's logs.
    """
    everyone = list(range(len(failures)))
    if is_daemon_dead:
        return everyone, "the MPS daemon ended"
    is_faulty = [_STICKY.search(each.text) is not None for each in failures]
    victims = [number for number in everyone if _ENDED_BY_MPS.search(failures[number].text) and not is_faulty[number]]
    logged = [line for line in (_STAMP.sub("", line) for line in log.splitlines()) if _LOGGED.search(line)]
    if len(failures) > 1:
        numbers = {int(word) for line in logged for word in _NUMBER.findall(line)}
        named = [number for number in everyone if failures[number].pids & numbers]
        if 0 < len(named) < len(failures):
            return [
                number for number in everyone if number not in named
            ], "a fatal GPU fault of another task ended it (MPS's log names that one)"
        if not any(is_faulty) if victims else logged or all(is_faulty):
            return everyone, "a fatal GPU fault ended all tasks of its GPU, and nothing says whose fault it was"
    return victims, "MPS ended its work, or refused it" if victims else ""
