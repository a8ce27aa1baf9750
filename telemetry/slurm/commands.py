"""Running Slurm's commands: found, bounded in time, in UTC and the C locale, with errors that say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from almanac.errors import CommandError


class Runner(Protocol):
    """What runs a command and returns its standard output."""

    def __call__(self, argv: Sequence[str]) -> bytes: ...


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def said(self) -> str:
        """The end of its error output, in one line."""
        return "; ".join(self.stderr.decode("utf-8", "replace").split("\n")).strip("; ")[-500:]


@dataclass(frozen=True)
class SlurmCommands:
    """Runs commands of one Slurm installation; times come as seconds since 1970."""

    bin_dir: str = ""
    timeout_s: float = 300.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, argv: Sequence[str]) -> bytes:
        """Standard output of argv. Raises CommandError where it is missing, fails or takes too long."""
        done = self.run(argv)
        if done.code:
            raise CommandError(f"{' '.join(argv)} ended with {done.code}: {done.said}", f"run {argv[0]} by hand")
        return done.stdout

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done:
        """The same for who reads exit code and errors. Raises CommandError where argv is missing or takes too long."""
        program = shutil.which(argv[0], path=self.bin_dir or None)
        if program is None:
            where = self.bin_dir or "PATH"
            raise CommandError(f"{argv[0]} was not found in {where}", "install the Slurm client, or set slurm.bin_dir")
        # BITSTR_LEN: the tasks of a pending array, not the first 64 characters of them.
        env = {**_inherited(), "TZ": "UTC", "LC_ALL": "C", "SLURM_BITSTR_LEN": "0", **self.env}
        if "--json" not in argv:  # 22.05's sacct --json cannot read its own times back in this format
            env["SLURM_TIME_FORMAT"] = "%s"
        try:
            done = subprocess.run(
                [program, *argv[1:]], input=stdin, capture_output=True, timeout=self.timeout_s, env=env, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"{' '.join(argv)} gave no answer within {self.timeout_s:g} s",
                "check that slurmdbd and slurmctld answer, or raise slurm.timeout_s",
            ) from error
        return Done(done.returncode, done.stdout, done.stderr)


def controller_config(commands: Runner) -> str:
    """What `scontrol show config` prints: slurmctld's settings, `Key = value` lines. Raises CommandError."""
    return commands(["scontrol", "show", "config"]).decode("utf-8", "replace")


def _inherited() -> dict[str, str]:
    """This process's environment without what would change the commands' output or reach (SQUEUE_FORMAT, ...)."""
    changing = ("SACCT_", "SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN")
    return {name: value for name, value in os.environ.items() if not name.startswith(changing)}
