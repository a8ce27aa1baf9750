"""Slurm's commands on a site's controller, as slurm.commands runs them here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sites import Site

from almanac.errors import CommandError
from slurm.commands import Done, lost_error

ENV = {"LC_ALL": "C", "TZ": "UTC", "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "%s"}


@dataclass(frozen=True)
class SiteCommands:
    """A user's commands there."""

    site: Site
    user: str = "root"

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done:
        # 22.05's sacct --json cannot read its own times back in this format.
        env = {name: value for name, value in ENV.items() if "--json" not in argv or name != "SLURM_TIME_FORMAT"}
        done = self.site.run_bytes("ctl", self.user, *argv, stdin=stdin, env=env)
        return Done(done.returncode, done.stdout, done.stderr)

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        done = self.run(argv, stdin)
        for line in done.stderr.decode("utf-8", "replace").splitlines():
            if lost := lost_error(line):
                raise lost
        return done

    def __call__(self, argv: Sequence[str]) -> bytes:
        done = self.run(argv)
        if done.code:
            raise CommandError(f"{argv[0]}: {done.said}")
        return done.stdout
