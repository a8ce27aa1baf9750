"""jobstats' summaries from its own database, for sites that keep AdminComment clean (EXTERNAL_DB_CONFIG).

The table has a row for each cluster and job, with the text that would be in AdminComment (PrincetonUniversity/jobstats,
db_handler.py: job_summary; docs/setup/external-database.md: job_statistics in older releases). It is read by MariaDB's
client with an option file, in the form that jobstats itself takes as config_file: the password is on no command line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from almanac.bounded import run
from almanac.config import Jobstats
from almanac.errors import ConfigError, ServerError
from almanac.scrub import scrub
from almanac.units import printable
from slurm.accounting import MAX_CLOCK_SKEW_S, Run

CLIENTS = ("mariadb", "mysql")
MOST_BYTES = 256 << 20
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(r"([0-9]{1,10})\t([0-9]{1,12})\t(JS1:[A-Za-z0-9+/=]*)")


@dataclass(frozen=True)
class JobstatsDatabase:
    """The database of one cluster. config.option_file must not be empty."""

    config: Jobstats
    cluster: str

    def summaries(self, jobs: Sequence[Mapping[str, Any]]) -> dict[Run, str]:
        """The summary of each ended run that has one, as AdminComment would hold it. jobs: rows of the table jobs.

        The table knows a job by its number, which Slurm gives again: a row that was last written before a run ended is
        of an earlier one. Raises ConfigError and ServerError.
        """
        ended = {row["job_id"]: row for row in sorted(jobs, key=_submitted) if row["end_s"] is not None}
        found = {}
        for job_id, updated_s, text in self._rows(ended) if ended else ():
            row = ended.get(job_id)
            if row is not None and updated_s + MAX_CLOCK_SKEW_S >= row["end_s"]:
                found[job_id, row["submit_s"]] = text
        return found

    def count(self) -> int:
        """The number of summaries of this cluster. Raises ConfigError and ServerError."""
        return int(self._ask(f"SELECT COUNT(*) FROM {self._table} WHERE cluster = '{self._name}'").strip() or b"0")

    def _rows(self, job_ids: Iterable[int]) -> Iterable[tuple[int, int, str]]:
        ids = ",".join(str(int(job_id)) for job_id in sorted(job_ids))
        sql = (
            f"SELECT jobid, UNIX_TIMESTAMP(updated_at), admin_comment FROM {self._table} "
            f"WHERE cluster = '{self._name}' AND jobid IN ({ids})"
        )
        lines = self._ask(sql).decode("utf-8", "replace").split("\n")
        return [(int(m[1]), int(m[2]), m[3]) for line in lines if (m := _LINE.fullmatch(line))]

    @property
    def _table(self) -> str:
        return self._word("jobstats.table", self.config.table)

    @property
    def _name(self) -> str:
        return self._word("site.cluster", self.cluster)

    @staticmethod
    def _word(key: str, text: str) -> str:
        if not _WORD.fullmatch(text):
            raise ConfigError(f"{key} is {text[:80]!r}", "use letters, digits, and _ . - only")
        return text

    def _ask(self, sql: str) -> bytes:
        file = check_option_file(self.config.option_file)
        database = self._word("jobstats.database", self.config.database)
        options = ["--batch", "--skip-column-names", "--connect-timeout=10", "--local-infile=0", database]
        for client in CLIENTS:
            try:
                argv = [client, f"--defaults-file={file}", *options]
                done = run(argv, timeout_s=self.config.timeout_s, most_bytes=MOST_BYTES, stdin=sql.encode())
            except FileNotFoundError:
                continue
            except (OSError, TimeoutError, ValueError) as error:
                raise ServerError(f"jobstats' database: {client}: {error}", "check jobstats.timeout_s") from error
            if done.code:
                raise ServerError(f"jobstats' database: {printable(scrub(done.said))}", f"check {file}")
            return done.stdout
        raise ConfigError("no client for jobstats' database", "install the package mariadb-client")


def check_option_file(path: str) -> str:
    """Return the path. Raises ConfigError if others can read the password in it."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise ConfigError(f"jobstats.option_file: {error.strerror}: {path}", "name a MariaDB option file") from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        fix = f"chown it to the user that runs almanac, and chmod 600 {path}"
        raise ConfigError(f"jobstats.option_file {path} is not a file of this user alone", fix)
    return path


def _submitted(row: Mapping[str, Any]) -> int:
    return int(row["submit_s"])
