#!python
"""`sbatch-almanac`: sbatch with advice for a user at a terminal. It always ends by becoming the real sbatch.

This file is also a program by itself, run with `python -I`: a user's PYTHONHOME or PYTHONPATH must not matter. The
Debian package writes that into the first line; where pip has installed it (and has written its interpreter into the
first line), scripts/wheel/sbatch-almanac starts it so. Until it is sure that there is somebody to ask, it imports next
to nothing; and whatever goes wrong after that, even almanac missing, sbatch gets what was typed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PACKED = b"ALMANAC_ENVIRON_"
"""Variables with numbers, in which scripts/wheel/sbatch-almanac hands on the environment that it got, in base64."""
PART_BYTES = 128_000
"""Length of each of them but the last."""
MAX_PARTS = 100
LAUNCHED = "-python"
"""End of this file's name if scripts/wheel/sbatch-almanac, in the same folder, starts it."""
MARK_FD = 719
MARK = 719_000_000_000_000
"""A mark that sbatch inherits and its job does not: an open file at MARK_FD whose offset is MARK + 10 x tried + told.

tried: how many programs named sbatch were run already (one that calls us again must not be run again). told: the user
was told or asked something, so that cli_filter.lua, which looks at /proc/self/fdinfo, keeps silent.
"""


HELP = """Usage: sbatch-almanac [OPTIONS of sbatch] SCRIPT [ARGS]...

Submit a job as sbatch does. At a terminal, it first shows advice for the job.
This host has no sbatch, whose own help would follow: run it where you submit.
"""


def main() -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at the question ends us as it would end sbatch
    environment, argv = initial_environment(), sys.argv[1:]
    tried, told = read_mark()
    changed, asked = advised(argv) if tried == 0 and may_matter(os.environ) else (argv, False)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and sbatch would inherit that
        signal.signal(signum, signal.SIG_DFL)
    fault = "PATH holds no other one"
    for number, path in enumerate(programs(os.environ)):
        if number < tried:
            continue
        set_mark(number + 1, told or asked)
        for words in (changed, argv):
            try:
                os.execve(path, ["sbatch", *words], environment)
            except OSError as error:
                fault = f"{path}: {error.strerror}"
    if not {"-h", "--help", "--usage"}.isdisjoint(argv):
        sys.stdout.write(HELP)
        sys.exit(0)
    sys.exit(f"sbatch-almanac: cannot run sbatch: {fault}")


def initial_environment() -> dict[bytes, bytes]:
    """The environment as it came: Python itself sets LC_CTYPE in the C locale, and the job would inherit that."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib takes 3 ms
            environment = _variables(file.read())
    except OSError:
        environment = dict(os.environb)
    block = b""
    for number in range(MAX_PARTS):
        part = environment.pop(PACKED + b"%d" % number, b"")
        block += _decoded(part)
        if len(part) < PART_BYTES:
            break
    return _variables(block) or environment


def _variables(block: bytes) -> dict[bytes, bytes]:
    variables: dict[bytes, bytes] = {}
    for entry in block.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            variables.setdefault(name, value)
    return variables


def _decoded(part: bytes) -> bytes:
    """The decoded part; b"" where the launcher did not write it."""
    if not part:
        return b""
    import binascii

    try:
        return binascii.a2b_base64(part)
    except binascii.Error:
        return b""


def may_matter(environ: Mapping[str, str]) -> bool:
    """True if advice is possible: outside jobs, not switched off, and with a terminal or in mode apply."""
    mode = environ.get("ALMANAC_ADVICE", "")
    return "SLURM_JOB_ID" not in environ and mode != "off" and (mode == "apply" or has_terminal())


def has_terminal(errors: int = 2) -> bool:
    """Return True if standard input and a descriptor are terminals and this program is in the foreground.

    In the background a question would stop it.
    """
    try:
        return os.isatty(0) and os.isatty(errors) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def advised(argv: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The arguments to submit with, and whether the user saw a message. After any fault, those that were typed."""
    gc.disable()  # nothing here lives long; 5 % of the time
    try:
        from slurm_hooks.submit.dialogue import Terminal, advise

        terminal = Terminal(_say, read_line, columns_of(2)) if has_terminal() else None
        return advise(argv, os.environ, terminal, lambda: configured(os.environ, "hooks", "advice_dir"))
    except Exception as error:
        if os.environ.get("ALMANAC_DEBUG"):
            sys.stderr.write(f"sbatch-almanac: {error!r}\n")
        return argv, False


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def columns_of(terminal: int) -> int:
    """The width of a terminal, for lines of 40 to 80 columns. 0: it does not know."""
    width = os.get_terminal_size(terminal).columns
    return min(max(width, 40), 80) if width else 80


def read_line() -> str:
    """One line from the terminal, and not a byte more: the rest is sbatch's."""
    return os.read(0, 1024).decode("ascii", "replace")


def programs(environ: Mapping[str, str]) -> Iterator[str]:
    """Programs that may be the real sbatch, in the order to try them; never this one."""
    own = {_identity(path) for path in (sys.argv[0], __file__, sys.argv[0].removesuffix(LAUNCHED))}
    named, folders = environ.get("ALMANAC_SBATCH"), environ.get("PATH", os.defpath).split(":")
    paths = [named] if named else [os.path.join(folder, "sbatch") for folder in folders]  # noqa: PTH118
    for path in paths:
        if os.path.isfile(path) and os.access(path, os.X_OK) and _identity(path) not in own:  # noqa: PTH113
            yield path
    last = os.path.join(configured(environ, "slurm", "bin_dir") or "/usr/bin", "sbatch")  # noqa: PTH118
    if _identity(last) not in own:
        yield last


def _identity(path: str) -> tuple[int, int] | None:
    """The same for every name of one file; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def configured(environ: Mapping[str, str], section: str, key: str) -> str:
    """Return a string of the configuration file; "" if the file or the key is absent, unreadable, or not trusted.

    almanac.config_file reads the same files and checks them. Importing it would take a tenth of this program's time.
    """
    home = environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config"
    named = environ.get("ALMANAC_CONFIG")
    paths = [named] if named else ["/etc/almanac/almanac.toml", f"{home}/almanac/config.toml"]
    path = next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113
    if path is None:
        return ""
    try:
        if path is not named and path.startswith(home) and os.stat(path).st_uid not in (0, os.geteuid()):  # noqa: PTH116
            return ""  # sudo and su can keep HOME, and the file names a program
        import tomllib

        if os.geteuid() == 0:
            from almanac.files import require_trusted

            require_trusted(path)
        with open(path, "rb") as file:  # noqa: PTH123
            return str(tomllib.load(file)[section][key])
    except Exception:  # whatever is in that file, the submission goes on
        return ""


def read_mark() -> tuple[int, bool]:
    """The mark of an earlier sbatch-almanac of the same submission: tried, told."""
    try:
        offset = os.lseek(MARK_FD, 0, os.SEEK_CUR) - MARK
    except OSError:
        return 0, False
    return (offset // 10, bool(offset % 10)) if 0 <= offset < 10_000 else (0, False)


def set_mark(tried: int, told: bool) -> None:
    """Note how often this submission was tried, and if its user was told, for the next sbatch-almanac in it.

    Without a mark (an old kernel, few descriptors, the number in use), the user may get a second question.
    """
    try:
        if read_mark() == (0, False):
            _claim()
        os.lseek(MARK_FD, MARK + 10 * tried + told, os.SEEK_SET)
    except (OSError, AttributeError):  # AttributeError: a C library older than memfd_create
        pass


def _claim() -> None:
    """Raises OSError where the number is taken."""
    try:
        os.fstat(MARK_FD)
    except OSError:
        os.dup2(os.memfd_create("almanac"), MARK_FD, inheritable=True)
    else:
        raise OSError("in use")


if __name__ == "__main__":
    main()
