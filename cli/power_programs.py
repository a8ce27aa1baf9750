"""almanac-power-off and almanac-power-on: Slurm's SuspendProgram and ResumeProgram (docs/power-programs.md).

They return as soon as the work runs in a session of its own. When a program ends, Slurm kills what is left of its
process group, so the parent waits until its child has left that group.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from slurm_hooks.power.bmc_file import BmcFile

USAGE = """usage: almanac-power-{0} HOSTLIST             power nodes {0}; returns at once, and logs the outcome
       almanac-power-{0} --status HOSTLIST    print the power state of the nodes, and change nothing"""


def main(wanted: Literal["on", "off"]) -> NoReturn:
    """Entry point of the launchers. Exit status 2: wrong arguments; 3: a refused BMC file or configuration."""
    from almanac.errors import AlmanacError
    from almanac.units import printable

    arguments = sys.argv[1:]
    is_status = arguments[:1] == ["--status"]
    if len(arguments) != 1 + is_status or arguments[-1].startswith("-"):
        is_help = arguments in (["--help"], ["-h"])
        print(USAGE.format(wanted), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    # Slurm's programs may have no PATH, and then no scontrol is found.
    os.environ.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin")
    try:
        _start(wanted, arguments[-1], is_status)
    except AlmanacError as error:
        _complain(wanted, printable(str(error), 500), printable(error.hint, 500))
        sys.exit(error.exit_code)
    sys.exit(0)


def _start(wanted: Literal["on", "off"], text: str, is_status: bool) -> None:
    from almanac.config_file import find_config, load_config
    from slurm_hooks.power.bmc_file import node_names, open_bmc_file, read_bmc_file

    config = load_config(find_config())
    path = Path(config.power.bmc_file)
    # Not one of 0 to 2, which detach() replaces.
    handle = fcntl.fcntl(open_bmc_file(path), fcntl.F_DUPFD_CLOEXEC, 3)
    file = read_bmc_file(path, handle)
    nodes = node_names(text, "the host list")
    if is_status:
        sys.exit(_show(nodes, file))
    detach(handle)
    _work(wanted, nodes, file, handle, config.slurm.bin_dir)
    os._exit(0)


def _work(wanted: Literal["on", "off"], nodes: tuple[str, ...], file: BmcFile, handle: int, bin_dir: str) -> None:
    from slurm import hostlist
    from slurm.commands import SlurmCommands
    from slurm_hooks.power.bmc_switch import Log, NodeStates, Switch

    log = Log(wanted, file.log_file)
    states = NodeStates(SlurmCommands(bin_dir, timeout_s=file.timeout_s), nodes)
    switch = Switch(wanted, file, handle, states)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switch.stop.set())
    log.note(nodes=hostlist.fold(nodes)[:1000], count=len(nodes))
    log.note(ended=dict(sorted(switch.run(nodes, log).items())))


def detach(keep: int) -> None:
    """Go on in a child with a session of its own, without the caller's files but `keep`; the parent ends here."""
    ready, done = os.pipe()
    if os.fork():
        os.close(done)
        os._exit(0 if os.read(ready, 1) else 1)
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.write(done, b".")
    most = os.sysconf("SC_OPEN_MAX")
    for first, end in ((3, keep), (keep + 1, most)):
        os.closerange(first, end)


def _show(nodes: tuple[str, ...], file: BmcFile) -> int:
    """Print each node's power state. Returns 1 if a BMC did not answer."""
    from concurrent.futures import ThreadPoolExecutor

    from almanac.units import printable
    from slurm_hooks.power.bmc_file import BmcError
    from slurm_hooks.power.bmc_switch import method_of

    def ask(node: str) -> tuple[str, bool]:
        if node not in file.by_node:
            return "no [[bmc]] table names this node", False
        try:
            return method_of(file.by_node[node], node, file.timeout_s).status() or "unknown", True
        except BmcError as error:
            return printable(str(error), 300), False

    with ThreadPoolExecutor(file.parallel) as pool:
        said = list(pool.map(ask, nodes))
    for node, (power, _) in zip(nodes, said, strict=True):
        print(f"{node}: {power}")
    return 0 if all(is_known for _, is_known in said) else 1


def _complain(wanted: str, message: str, hint: str) -> None:
    """Print to standard error and to syslog, because Slurm discards what its programs print."""
    import syslog

    print(f"almanac-power-{wanted}: {message}", *([f"try: {hint}"] if hint else []), sep="\n", file=sys.stderr)
    syslog.openlog(f"almanac-power-{wanted}", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, message)
