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
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from almanac.units import printable
from slurm_hooks.last_look import Facts, must_still_hold
from slurm_hooks.power.bmc_file import BmcError, BmcFile
from slurm_hooks.power.bmc_guard import NodeStates, why_not_off, why_not_on
from slurm_hooks.power.bmc_methods import Method, method_of

POLL_S = 2.0
LOCK_POLL_S = 0.2


class EndedError(Exception):
    """The node is left alone. result: "refused" by Slurm's word on it, or "stopped" with the program."""

    def __init__(self, result: str, message: str) -> None:
        super().__init__(message)
        self.result = result


@dataclass
class Switch:
    """One call of a program. bmc_handle: the open BMC file, on which nodes are locked between calls."""

    wanted: Literal["on", "off"]
    file: BmcFile
    bmc_handle: int
    states: NodeStates
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, nodes: Sequence[str], log: Log) -> Counter[str]:
        """Change every node, and log each as soon as it is done. Returns how many ended in each way."""

        def one(node: str) -> str:
            started_s = time.monotonic()
            result, message, tries = self._node(node)
            log.node(node, result, message, tries, round(time.monotonic() - started_s, 2))
            return result

        with ThreadPoolExecutor(self.file.parallel) as pool:
            return Counter(pool.map(one, nodes))

    def _node(self, node: str) -> tuple[str, str, int]:
        """How it went (done, already, refused, stopped, or failed), a message, and the number of tries."""
        tries = 0
        bmc = self.file.by_node.get(node)
        if bmc is None:
            return "failed", "no [[bmc]] table of the BMC file names this node", tries
        try:
            method = method_of(bmc, node, self.file.timeout_s)
            with self._locked(node):
                while True:
                    tries += 1
                    try:
                        return *self._change(node, method), tries
                    except BmcError as error:
                        if error.is_final or tries > self.file.retries:
                            return "failed", str(error), tries
                    self._wait(POLL_S * 2 ** (tries - 1))
        except EndedError as error:
            return error.result, str(error), tries
        except Exception as error:  # one node's trouble is not the others'; no text of it: it may hold a password
            return "failed", f"unexpected {type(error).__name__}", tries

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
        self._wait(0)
        refusals: dict[str, Facts] = {}

        def read(nodes: Collection[str]) -> dict[str, Facts]:
            why = why_not_off if self.wanted == "off" else why_not_on
            refusals.update({each: {"refusal": why(self.states.of(each))} for each in nodes})
            return refusals

        try:
            if must_still_hold({node: {"refusal": ""}}, read):
                raise EndedError("refused", refusals[node]["refusal"])
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
            self._wait(POLL_S)

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise EndedError("stopped", "the program was stopped")

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

    def node(self, node: str, result: str, message: str, tries: int, took_s: float) -> None:
        level = syslog.LOG_INFO if result in ("done", "already") else syslog.LOG_WARNING
        row = {"node": node, "result": result, "message": printable(message, 300), "tries": tries, "took_s": took_s}
        self._write(row, level)

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
