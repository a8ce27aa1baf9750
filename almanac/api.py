"""almanac from Python: jobs, advice, and job reports of one cluster. docs/python-api.md shows every call.

    site = open_site("/var/lib/almanac")
    jobs = site.jobs(user="ann")
    advice = site.advise(sbatch_request(["-J", "train", "--gpus=4"], user="ann"))
    print(explain(advice))

This is the one module of `almanac/` that uses the other packages; none of them imports it. What is slow to load it
loads when you call a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from almanac.errors import RequestError
from slurm.sbatch import parse_submission
from telemetry.site import Site

if TYPE_CHECKING:
    import pandas as pd

    from almanac.records import Advice, JobRequest
    from slurm.commands import SlurmCommands


class SiteReader(Site):
    """One cluster in a store, for reading. `open_site` makes it."""

    def jobs(
        self,
        columns: Sequence[str] | None = None,
        *,
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
    ) -> pd.DataFrame:
        """GPU jobs that have ended and were submitted in [since_s, until_s), oldest end first.

        columns: names from docs/python-api.md; None gives all. `frame.attrs["units"]` maps a column to its unit.
        Missing numbers are NaN, missing texts None. Raises StoreError, and ValueError for an unknown column.
        """
        from telemetry.history import HISTORY, UNITS, load_history_table

        names = list(HISTORY.names if columns is None else columns)
        if unknown := [name for name in names if name not in HISTORY.names]:
            raise ValueError(f"unknown columns: {', '.join(unknown)}; known: {', '.join(HISTORY.names)}")
        rows = load_history_table(self.store, names, since_s, until_s, user)
        frame: pd.DataFrame = rows.to_pandas()
        frame.attrs["units"] = {name: UNITS[name] for name in names if name in UNITS}
        return frame

    def advise(self, request: JobRequest) -> Advice:
        """The advice of `almanac advise` for request.user. Slurm is not asked for defaults. Raises StoreError."""
        from advisor.from_store import advise_from_store

        return advise_from_store(self, request)

    def report(self, job_id: int | str) -> dict[str, Any]:
        """The answer about one job as plain values, as `almanac report --json` prints it; of an array, its last task.

        Raises StoreError if no source has the job, NotAllowedError if it is another user's, and CommandError if Slurm
        did not answer. A job that waits has `kind` "waiting".
        """
        from reports.job.answer import answer_jobs, plain_answer
        from reports.published.caller import StoreJobs
        from slurm.named_jobs import parse_id

        found = answer_jobs(self, StoreJobs(self, None), [parse_id(str(job_id))]).jobs[-1]
        if found.state and found.state.error:
            raise found.state.error
        return plain_answer(found)


def open_site(
    store: str | Path | None = None,
    cluster: str = "",
    *,
    config: str | Path | None = None,
    clock: Callable[[], float] = time.time,
    run: SlurmCommands | None = None,
) -> SiteReader:
    """Open a store for reading.

    store, config: as `--store` and `--config` of the command line, with the same defaults. cluster: needed where the
    store holds several. clock: the time of each answer, in seconds since 1970. run: what runs Slurm's commands. Raises
    ConfigError, StoreError. Only the permissions of the store's files limit what you see.
    """
    site = SiteReader(str(config) if config else None, str(store) if store else None, cluster, clock, run=run)
    _ = site.store
    return site


def sbatch_request(argv: Sequence[str], user: str) -> JobRequest:
    """The request of the words that follow `sbatch`: options, then a script file, whose #SBATCH lines are read.

    The environment's SBATCH_* variables do not count. Raises RequestError.
    """
    return parse_submission(argv, {}, _read_script).request(user, 0)


def explain(advice: Advice, *, why: bool = False) -> str:
    """The text of `almanac advise`: lines joined by newlines. why: adds how the time and priority came about."""
    from advisor import explain as texts

    return texts.explain(advice, why)


def _read_script(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise RequestError(f"{name}: cannot be read: {error.strerror}", "name an sbatch script") from error
