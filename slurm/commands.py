"""Run Slurm's commands: found, bounded in time, in UTC and the C locale, with errors that say what to do."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from almanac.bounded import Done as Done
from almanac.bounded import run
from almanac.errors import CommandError
from almanac.units import printable

MOST_BYTES = {"sacct": 2 << 30, "squeue": 2 << 30}
"""Limit on the output of one command. A job takes about 20 kB in `sacct --json`, and 10 kB in `squeue --json`."""
MOST_OTHER_BYTES = 256 << 20
"""Limit on the output of other commands, such as `scontrol show node` of 10,000 nodes (20 MB)."""
_LOST = re.compile(
    r"(?:[0-9_,%:\[\]-]+: |slurm_[a-z_]+ error: )?"
    r"(?:Unable to contact slurm controller(?: \([a-z ]+\))?|Unexpected message received"
    r"|Insane message length|Communication (?:connection|shutdown) failure|Message (?:send|receive) failure"
    r"|Protocol authentication error|Socket timed out on send/recv operation|Zero Bytes were transmitted or received"
    r"|Incompatible versions of client and server code|Slurm backup controller in standby mode"
    r"|Connection (?:refused|timed out|reset by peer)|Broken pipe|No route to host)(?: for job \S+)?"
)
"""Texts of slurm_strerror for a slurmctld out of reach, 22.05 to 26.05. The whole line: a hook may print a job's name.
"""


def lost_error(said: str) -> CommandError | None:
    """The error to raise where `said`, a line of Slurm's, means that slurmctld is out of reach; None otherwise.

    Each further request would wait for MessageTimeout (10 s) before it fails.
    """
    if not _LOST.fullmatch(said.strip()):
        return None
    return CommandError(
        f"lost the connection to slurmctld: {printable(said.strip())}",
        "check that slurmctld answers, then run this again",
    )


class Runner(Protocol):
    """Run a command and return its standard output."""

    def __call__(self, argv: Sequence[str]) -> bytes: ...


@dataclass(frozen=True)
class SlurmCommands:
    """Runs commands of one Slurm installation; times come as seconds since 1970."""

    bin_dir: str = ""
    timeout_s: float = 300.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, argv: Sequence[str]) -> bytes:
        """Return the standard output of argv. Raises CommandError if argv is missing, fails, or takes too long."""
        done = self.run(argv)
        if done.code:
            raise CommandError(
                f"{' '.join(argv)} failed with exit code {done.code}: {done.said}", f"run {argv[0]} yourself to see why"
            )
        return done.stdout

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done:
        """Run a command; return its exit code and both outputs.

        Raises CommandError if the command is missing or takes too long.
        """
        return self._run(argv, stdin)

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        """Feed argv requests to slurmctld, and return its exit code and error output; no standard output is kept.

        Raises CommandError where argv is missing or takes too long, and at the first sign that slurmctld is out of
        reach. argv and its children are ended then.
        """

        def see(line: bytes) -> None:
            if lost := lost_error(line.decode("utf-8", "replace")):
                raise lost

        return self._run(argv, stdin, see)

    def _run(self, argv: Sequence[str], stdin: bytes, see: Callable[[bytes], None] | None = None) -> Done:
        command, most_bytes = [self._program(argv), *argv[1:]], MOST_BYTES.get(argv[0], MOST_OTHER_BYTES)
        try:
            return run(
                command, stdin=stdin, timeout_s=self.timeout_s, most_bytes=most_bytes, env=self._environment(argv),
                see_error=see,
            )  # fmt: skip
        except TimeoutError as error:
            hint = "check that slurmdbd and slurmctld answer, or raise slurm.timeout_s"
            raise CommandError(f"{' '.join(argv)} {error}", hint) from error
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror}", "correct slurm.bin_dir") from error
        except ValueError as error:
            hint = f"run {argv[0]} yourself to see what it prints"
            raise CommandError(f"{' '.join(argv)} {error}", hint) from error

    def _program(self, argv: Sequence[str]) -> str:
        program = shutil.which(argv[0], path=self.bin_dir or None)
        if program is None:
            where = self.bin_dir or "PATH"
            raise CommandError(f"{argv[0]} was not found in {where}", "install the Slurm client, or set slurm.bin_dir")
        return program

    def _environment(self, argv: Sequence[str]) -> dict[str, str]:
        # BITSTR_LEN: the tasks of a pending array, not the first 64 characters of them.
        env = {**_inherited(), "TZ": "UTC", "LC_ALL": "C", "SLURM_BITSTR_LEN": "0", **self.env}
        if "--json" not in argv:  # 22.05's sacct --json cannot read its own times back in this format
            env["SLURM_TIME_FORMAT"] = "%s"
        return env


def shown_jobs(commands: Runner, name: str) -> list[str]:
    """Each job of a name that waits or runs: id, state, and why it waits. Raises CommandError."""
    return commands(["squeue", "-h", "-n", name, "-o", "%i %T %r"]).decode("utf-8", "replace").splitlines()


def _inherited() -> dict[str, str]:
    """This process's environment without what would change the commands' output or reach (SQUEUE_FORMAT, ...)."""
    changing = ("SACCT_", "SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN")
    return {name: value for name, value in os.environ.items() if not name.startswith(changing)}


class Settings(dict[str, str]):
    """Values by name, in Slurm's spelling; "" for those that are not set."""

    def words(self, name: str) -> list[str]:
        """The parts of a list, in lower case."""
        return [word.strip() for word in self.get(name, "").lower().split(",")]

    def numbers(self, name: str) -> dict[str, int]:
        """The parts of a list that are key=number."""
        pairs = (word.split("=", 1) for word in self.words(name) if "=" in word)
        return {key: int(number) for key, number in pairs if re.fullmatch(r"[0-9]{1,9}", number)}

    def numbered(self, *names: str) -> list[str]:
        """The values that are set of these names and of those that begin with them, such as Epilog[0]."""
        return [value for key, value in self.items() if key.startswith(names) and value]

    @property
    def user(self) -> tuple[str, int | None]:
        """Name and number of SlurmUser; the number is None if Slurm does not print it."""
        found = re.fullmatch(r"([^(\s]*)(?:\((\d{1,10})\))?", self.get("SlurmUser", ""))
        return (found[1], int(found[2]) if found[2] else None) if found else ("", None)


def parse_settings(text: str) -> Settings:
    """The settings in `Key = value` lines."""
    pairs = (line.partition("=") for line in text.splitlines())
    return Settings((name.strip(), value.strip().replace("(null)", "")) for name, equals, value in pairs if equals)


def within(commands: Runner, seconds: float) -> Runner:
    """Return these commands with a timeout of at most `seconds`, for callers whose user waits for the answer."""
    if not isinstance(commands, SlurmCommands):
        return commands
    return replace(commands, timeout_s=min(commands.timeout_s, seconds))


def slurm_settings(commands: Runner) -> Settings:
    """Ask slurmctld. Raises CommandError."""
    return parse_settings(commands(["scontrol", "show", "config"]).decode("utf-8", "replace"))
