"""Powering many nodes down or up: a bounded number at once, each with timeouts, retries and a line in the log.

Slurm calls SuspendProgram for idle nodes only. Minutes can pass before a slow BMC obeys, and a person can call the
program by hand: power is cut only while Slurm still says that the node is powering down and runs nothing.

The ways to a node's power are IPMI by ipmitool, Redfish by sushy (redfish.py), and a site's own commands. Passwords go
to ipmitool through its environment, never into an argument list, which every user of the host can read. No message
holds one.
"""

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from almanac import bounded
from almanac.errors import CommandError, ConfigError
from almanac.units import printable
from slurm import hostlist
from slurm.commands import SlurmCommands
from slurm.nodes import shown_states
from slurm.states import NODE_OFF, NODE_WAKING
from slurm_hooks.orders import Facts, must_still_hold
from slurm_hooks.power.bmc_file import BmcError, BmcFile, CommandTable, IpmiTable, RedfishTable, Table

POLL_S = 2.0
LOCK_POLL_S = 0.2
DOWN = NODE_OFF | {"POWER_DOWN"}
CUT_FROM = frozenset({"IDLE", "DOWN"})
MAX_AGE_S = 0.5
Wanted = Literal["on", "off", "soft"]
"""soft: ask the operating system to shut down."""
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "USER", "LOGNAME", "SLURM_CONF")
_MOST_BYTES = 1 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not_off(states: frozenset[str]) -> str:
    """Return why a node in these states keeps its power; "" if it can be cut."""
    shown = "+".join(sorted(states))
    if not states & CUT_FROM or "COMPLETING" in states:
        return f"Slurm says {shown}: it may run a job"
    if states & NODE_WAKING:
        return f"Slurm says {shown}: it is being woken"
    if not states & DOWN:
        return f"Slurm says {shown}: nobody powers it down (scontrol update nodename=... state=power_down_asap)"
    return ""


def why_not_on(states: frozenset[str]) -> str:
    """Return why a node in these states is left off; "" if it can wake.

    Waking is safe: only a later call to power it down forbids it.
    """
    if states & {"POWER_DOWN", "POWERING_DOWN"} and not states & NODE_WAKING:
        return f"Slurm says {'+'.join(sorted(states))}: it is being powered down"
    return ""


class NodeStates:
    """Slurm's answers about some nodes, asked for all at once, and again where an answer is older than MAX_AGE_S."""

    def __init__(
        self, commands: SlurmCommands, nodes: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._commands, self._nodes, self._clock = commands, hostlist.fold(nodes), clock
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._known: Mapping[str, frozenset[str]] = {}
        self._trouble = ""

    def of(self, node: str) -> frozenset[str]:
        """Return a node's states. Raises BmcError if Slurm does not answer or lacks the node: try again."""
        with self._lock:
            if self._clock() > self._asked_s + MAX_AGE_S:
                self._ask()
                self._asked_s = self._clock()
            if node not in self._known:
                raise BmcError(self._trouble or f"scontrol does not show node {node}")
            return self._known[node]

    def _ask(self) -> None:
        self._known, self._trouble = {}, ""
        try:
            self._known, said = shown_states(self._commands, self._nodes)
        except (CommandError, OSError) as error:
            self._trouble = f"Slurm does not answer: {error}"
        else:
            self._trouble = "" if self._known else f"Slurm does not answer: {said}"


class Method(Protocol):
    """A way to switch one node's power. Both methods raise BmcError."""

    can_soften: bool

    def status(self) -> str | None:
        """Return "on" or "off"; None if this method cannot tell."""

    def set(self, wanted: Wanted) -> None: ...


def method_of(bmc: Table, node: str, timeout_s: float) -> Method:
    if isinstance(bmc, RedfishTable):
        from slurm_hooks.power.redfish import Redfish  # late: sushy takes 0.2 s

        return Redfish(bmc, node, timeout_s)
    return Ipmi(bmc, node, timeout_s) if isinstance(bmc, IpmiTable) else CommandBmc(bmc, node, timeout_s)


class Ipmi:
    """ipmitool over LAN."""

    can_soften = True

    def __init__(self, bmc: IpmiTable, node: str, timeout_s: float) -> None:
        host, _, port = bmc.address.replace("{node}", node).partition(":")
        self._argv = ["ipmitool", "-I", "lanplus", "-H", host, "-p", port or "623", "-U", bmc.user, "-E"]
        self._argv += ["-C", bmc.cipher_suite] if bmc.cipher_suite else []
        self._password, self._timeout_s = bmc.password, timeout_s

    def status(self) -> str | None:
        said = self._run("status").strip()
        power = said.lower().removeprefix("chassis power is ")
        if power not in ("on", "off"):
            raise BmcError(f"ipmitool says {said[:80]!r}, expected: Chassis Power is on")
        return power

    def set(self, wanted: Wanted) -> None:
        self._run(wanted)

    def _run(self, what: str) -> str:
        return run([*self._argv, "chassis", "power", what], self._timeout_s, self._password)


class CommandBmc:
    """A site's own programs."""

    can_soften = False

    def __init__(self, bmc: CommandTable, node: str, timeout_s: float) -> None:
        self._bmc, self._node, self._timeout_s = bmc, node, timeout_s

    def status(self) -> str | None:
        if not self._bmc.status_command:
            return None
        said = self._run(self._bmc.status_command).strip()
        if said not in ("on", "off"):
            raise BmcError(f"status_command says {said[:80]!r}, expected on or off")
        return said

    def set(self, wanted: Wanted) -> None:
        self._run(self._bmc.on_command if wanted == "on" else self._bmc.off_command)

    def _run(self, command: tuple[str, ...]) -> str:
        return run([part.replace("{node}", self._node) for part in command], self._timeout_s)


def run(argv: list[str], timeout_s: float, password: str = "") -> str:
    """The output of a program; it and all that it started have ended when this returns. Raises BmcError."""
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PATH": PATH}
    if password:
        env["IPMI_PASSWORD"] = password
    try:
        done = bounded.run(argv, timeout_s=timeout_s, most_bytes=_MOST_BYTES, env=env)
    except (TimeoutError, ValueError) as error:
        raise BmcError(f"{argv[0]} {error}") from None
    except OSError as error:
        raise BmcError(f"{argv[0]}: {error.strerror}", is_final=True) from error
    except ConfigError as error:
        raise BmcError(f"{error}; {error.hint}", is_final=True) from error
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.code:
        shown = said.replace(password, "***") if password else said
        raise BmcError(f"{argv[0]} failed with exit code {done.code}: {shown.strip()[-200:]}")
    return said


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
        """Return the result (done, already, refused, stopped, or failed), a message, and the number of tries."""
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
        """Return True if the node has the wanted power before the time is up; a method that cannot tell is believed."""
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
