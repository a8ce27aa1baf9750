"""almanac-prompt: the question of cli_filter.lua at a terminal.

Reads the submission as JSON from descriptor 3, asks at descriptors 0 and 4, and writes the option to change, a tab, and
its new value. `timeout` starts it, and ends it if it has said nothing after 2 s; once it asks, it waits for the user.
After any fault it writes nothing, and the submission goes on unchanged.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from slurm.options import Option
from slurm.sbatch import to_request
from slurm_hooks.submit import offer
from slurm_hooks.submit.dialogue import PromptSubmission, Terminal, consult, script_text
from slurm_hooks.submit.sbatch_almanac import columns_of, has_terminal, read_line

SUBMISSION_FD, TERMINAL_FD = 3, 4
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h: a signal that a process gets when its parent ends."""
MAX_BYTES = 65_536
DEFAULT_NAMES = {"sbatch": "sbatch", "salloc": "interactive"}
"""Name of a job without a script, by command."""
_UNSET = {"nodes": "1-0", "ntasks": "1"}
"""cli_filter's values of options that were not given; a number is then "-2" or 65534."""
_COUNTS = ("ntasks", "ntasks-per-node", "sockets-per-node", "cpus-per-task", "cpus-per-gpu", "mincpus")
_EXCLUSIVE = ("exclusive", "topo", "user", "mcs")


def main() -> None:
    """Entry point of the program."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # srun blocks it
    with suppress(Exception):
        sys.stdout.buffer.write(_answer())


def _answer() -> bytes:
    with open(SUBMISSION_FD, "rb") as file:
        told = parse_told(file.read(MAX_BYTES))
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - a host may allow 1,000,000,000
        with suppress(OSError):
            os.close(number) if number > TERMINAL_FD else None
    terminal = Terminal(_say, read_line, columns_of(TERMINAL_FD)) if has_terminal(TERMINAL_FD) else None
    change, _ = consult(submission_of(told, int(time.time())), os.environ, terminal, told["advice_dir"])
    return os.fsencode(f"{change.option.removeprefix('--')}\t{change.value}") if change else b""


def parse_told(data: bytes) -> dict[str, str]:
    """The texts that cli_filter.lua tells by name, as they were typed. Raises ValueError."""
    return {name: os.fsdecode(text.encode("latin-1")) for name, text in json.loads(data).items()}


def _say(text: str) -> None:
    """Once something is said, the parent that would end this program after 2 s has to go."""
    parent = os.getppid()
    with suppress(OSError), open(f"/proc/{parent}/comm", encoding="utf-8") as file:  # noqa: PTH123 - it may be gone
        if file.read() == "timeout\n":
            import ctypes  # late: takes as long as all the rest

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)  # set by timeout of coreutils 9.10
            os.kill(parent, signal.SIGKILL)
    os.write(TERMINAL_FD, os.fsencode(text))


def submission_of(told: Mapping[str, str], now_s: int) -> PromptSubmission:
    """A submission as cli_filter.lua tells it. Raises RequestError if an option cannot be read."""
    options = {name: text for name, text in told.items() if _is_given(name, text)}
    if "gres" in options:
        options["gres"] = ",".join(term.removeprefix("gres:").removeprefix("gres/") for term in told["gres"].split(","))
    command = told.get("command", "")
    default = "wrap" if "wrap" in told else command.rpartition("/")[2] or DEFAULT_NAMES.get(told["type"], "")
    request = to_request({name: Option(name, text) for name, text in options.items()}, "", now_s, default)
    if told["offset"] != "0":
        request = replace(request, may_use_more=True)  # a later component of a het job

    def text() -> str:
        return told["wrap"] if "wrap" in told else script_text(command, options.get("chdir", ""))

    return PromptSubmission(request, options, text)


def _is_given(name: str, text: str) -> bool:
    """False if this is the value of an option that was not given."""
    if name in _COUNTS and not (text.isdecimal() and 1 <= int(text) < offer.NO_COUNT):
        return False
    if name == "exclusive":
        return text in _EXCLUSIVE
    if name == "time":
        return offer.seconds(text) is not None
    return text not in ("", _UNSET.get(name))


if __name__ == "__main__":
    main()
