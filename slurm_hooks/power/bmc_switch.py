"""Powering many nodes down or up: a bounded number at once, each with timeouts, retries and a line in the log."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import syslog
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from almanac.units import printable
from slurm_hooks.last_look import Facts, must_still_hold
from slurm_hooks.power.bmc_file import BmcFile
from slurm_hooks.power.bmc_guard import NodeStates, why_not_off, why_not_on
from slurm_hooks.power.bmc_methods import BmcError, Method, method_of

POLL_S = 2.0
LOCK_POLL_S = 0.2


class RefusedError(Exception):
    """Slurm's word on a node forbids the change."""


class StoppedError(Exception):
    """The program was told to end."""


@dataclass(frozen=True)
class SwitchOutcome:
    """How it went. result: done, already, refused, stopped or failed."""

    node: str
    result: str
    message: str = ""
    tries: int = 0
    took_s: float = 0.0


@dataclass
class Switch:
    """One call of a program. bmc_handle: the open BMC file, on which nodes are locked between calls."""

    wanted: Literal["on", "off"]
    file: BmcFile
    bmc_handle: int
    states: NodeStates
    poll_s: float = POLL_S
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, nodes: Sequence[str], log: Callable[[SwitchOutcome], None]) -> list[SwitchOutcome]:
        """Change every node; `log` hears of each as soon as it is done."""

        def one(node: str) -> SwitchOutcome:
            outcome = self._node(node)
            log(outcome)
            return outcome

        with ThreadPoolExecutor(self.file.parallel) as pool:
            return list(pool.map(one, nodes))

    def _node(self, node: str) -> SwitchOutcome:
        started_s, tries = time.monotonic(), 0

        def outcome(result: str, message: str = "") -> SwitchOutcome:
            return SwitchOutcome(node, result, message, tries, round(time.monotonic() - started_s, 2))

        bmc = self.file.by_node.get(node)
        if bmc is None:
            return outcome("failed", "no [[bmc]] table of the BMC file names this node")
        try:
            method = method_of(bmc, node, self.file.timeout_s)
            with self._locked(node):
                while True:
                    tries += 1
                    try:
                        return outcome(*self._change(node, method))
                    except BmcError as error:
                        if error.is_final or tries > self.file.retries:
                            return outcome("failed", str(error))
                    self._wait(self.poll_s * 2 ** (tries - 1))
        except RefusedError as error:
            return outcome("refused", str(error))
        except StoppedError:
            return outcome("stopped", "the program was stopped")
        except Exception as error:  # one node's trouble is not the others'; no text of it: it may hold a password
            return outcome("failed", f"unexpected {type(error).__name__}")

    def _change(self, node: str, method: Method) -> tuple[str, str]:
        self._check(node)
        if method.status() == self.wanted:
            return "already", f"it was {self.wanted}"
        if self.wanted == "off" and method.can_soften and self.file.soft_s > 0:
            self._check(node)  # a BMC takes long to answer
            with contextlib.suppress(BmcError):
                method.set("soft")
                if self._is_reached(method, self.file.soft_s):
                    return "done", "shut down by itself"
        self._check(node)
        method.set(self.wanted)
        if not self._is_reached(method, self.file.timeout_s):
            raise BmcError(f"not {self.wanted} after {self.file.timeout_s:g} s")
        return "done", ""

    def _check(self, node: str) -> None:
        if self.stop.is_set():
            raise StoppedError
        refusals: dict[str, Facts] = {}

        def read(nodes: Collection[str]) -> dict[str, Facts]:
            why = why_not_off if self.wanted == "off" else why_not_on
            refusals.update({each: {"refusal": why(self.states.of(each))} for each in nodes})
            return refusals

        try:
            if must_still_hold({node: {"refusal": ""}}, read):
                raise RefusedError(refusals[node]["refusal"])
        except BmcError:
            if self.wanted == "off":
                raise

    def _is_reached(self, method: Method, within_s: float) -> bool:
        """Whether the node has the wanted power before the time is up; a method that cannot tell is believed."""
        until_s = time.monotonic() + within_s
        while True:
            status = method.status()
            if status is None or status == self.wanted:
                return True
            if time.monotonic() > until_s:
                return False
            self._wait(self.poll_s)

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise StoppedError

    @contextlib.contextmanager
    def _locked(self, node: str) -> Iterator[None]:
        """One call at a time changes a node: a byte of the BMC file, which nobody else can open, is its lock."""
        place = zlib.crc32(node.encode())
        while True:
            try:
                fcntl.lockf(self.bmc_handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            self._wait(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self.bmc_handle, fcntl.LOCK_UN, 1, place)


class Log:
    """One JSON line per node, in the BMC file's log_file or in syslog. Text of others cannot end a line."""

    def __init__(self, wanted: str, log_file: str) -> None:
        self._wanted, self._file = wanted, log_file
        syslog.openlog(f"almanac-power-{wanted}", syslog.LOG_PID, syslog.LOG_DAEMON)

    def outcome(self, outcome: SwitchOutcome) -> None:
        level = syslog.LOG_INFO if outcome.result in ("done", "already") else syslog.LOG_WARNING
        message = printable(outcome.message, 300)
        self._write({**outcome.__dict__, "message": message}, level)

    def note(self, **values: object) -> None:
        self._write(values, syslog.LOG_INFO)

    def _write(self, values: dict[str, object], level: int) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"time": stamp, "program": f"almanac-power-{self._wanted}", **values})
        if not self._file or not self._append(f"{line}\n".encode()):
            syslog.syslog(level, line)

    def _append(self, line: bytes) -> bool:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            handle = os.open(self._file, flags, 0o640)
            try:
                return os.write(handle, line) == len(line)
            finally:
                os.close(handle)
        except OSError:
            return False
