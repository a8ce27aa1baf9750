"""almanac from Python: jobs, advice, and job reports of one cluster. docs/python-api.md shows every call.

    site = open_site("/var/lib/almanac")
    jobs = site.jobs(user="ann")
    advice = site.advise(sbatch_request(["-J", "train", "--gpus=4"], user="ann"))
    print(explain(advice))

This is the one module of `almanac/` that uses the other packages; none of them imports it. It loads them when you call
a function, so the import itself is quick.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from almanac.errors import RequestError, StoreError

if TYPE_CHECKING:
    import pandas as pd

    from almanac.config import Config
    from almanac.records import Advice, Request
    from telemetry.store.cluster_store import ClusterStore


@dataclass(frozen=True)
class SiteReader:
    """One cluster in a store. clock: the time of each answer, in seconds since 1970. `open_site` makes it."""

    store: ClusterStore
    config: Config
    clock: Callable[[], int]

    @property
    def cluster(self) -> str:
        return self.store.cluster

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

    def advise(self, request: Request) -> Advice:
        """The advice of `almanac advise` for request.user. Slurm is not asked for defaults. Raises StoreError."""
        from advisor.from_store import advise_from_store

        return advise_from_store(self.store, request, self.config, self.clock())

    def report(self, job_id: int) -> dict[str, Any]:
        """The report of one job as plain values, as `almanac report --json` prints it.

        Raises StoreError where the store does not hold the job.
        """
        from reports.job.context import build
        from reports.job.report import to_json

        found = build(self.store, [job_id], self.config, self.clock(), has_series=False)
        if not found:
            raise StoreError(f"{self.store.root}: holds no job {job_id} of {self.cluster}", "run `almanac ingest`")
        return to_json(found[0])


def open_site(
    store: str | Path | None = None,
    cluster: str = "",
    *,
    config: str | Path | None = None,
    clock: Callable[[], int] = lambda: int(time.time()),
) -> SiteReader:
    """Open a store for reading.

    store, config: as `--store` and `--config` of the command line, with the same defaults. cluster: needed where the
    store holds several. Raises ConfigError, StoreError. Only the permissions of the store's files limit what you see.
    """
    from almanac.config_file import find_config, load_config
    from telemetry.store.clusters import cluster_of
    from telemetry.store.store import Store

    settings = load_config(find_config(None if config is None else str(config)))
    root = Path(store or os.environ.get("ALMANAC_STORE") or settings.store.path)
    opened = Store.open(root, memory_limit_mib=settings.store.memory_limit_mib, threads=settings.store.threads)
    return SiteReader(opened.of(cluster_of(opened, cluster or settings.site.cluster)), settings, clock)


def sbatch_request(argv: Sequence[str], user: str) -> Request:
    """The request of the words that follow `sbatch`: options, then a script file, whose #SBATCH lines are read.

    The environment's SBATCH_* variables do not count. Raises RequestError.
    """
    from telemetry.slurm.sbatch import parse_submission

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
