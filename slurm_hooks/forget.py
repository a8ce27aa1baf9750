"""What logs and records of jobs keep of one user's runs, and how it is removed, for `almanac forget`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from almanac.kept import Kept
from slurm_hooks.mig.raise_log import RaiseLog
from slurm_hooks.placement.log import PlacementLog
from slurm_hooks.priority.action_log import ActionLog
from telemetry.store.atomic import opened

Runs = Collection[tuple[int, int]]
_RECORD = re.compile(r"(?P<cluster>[A-Za-z0-9_-]+)\.(?P<job>[0-9]{1,10})\..+\.(?P<time>[0-9]{1,12})")
_NOTICE = re.compile(r"(?P<job>[1-9][0-9]{0,9})\.[0-9a-f-]{1,36}")


def log_place(actions: Path, cluster: str, runs: Runs) -> Kept:
    """Lines of the log of site factors. runs: job id and submission."""
    log, is_theirs = ActionLog(actions), _line_of(cluster, runs)
    return Kept("log of site factors", log.number(is_theirs), "line", lambda: log.remove(is_theirs))


def raise_place(actions: Path, cluster: str, runs: Runs) -> Kept:
    """Lines of the log of raised jobs. runs: job id and submission."""
    log, is_theirs = RaiseLog(actions), _line_of(cluster, runs)
    return Kept("log of raised jobs", log.number(is_theirs), "line", lambda: log.remove(is_theirs))


def placement_place(actions: Path, cluster: str, runs: Runs) -> Kept:
    """Lines of the log of placed jobs. runs: job id and submission."""
    log, is_theirs = PlacementLog(actions), _line_of(cluster, runs)
    return Kept("log of placed jobs", log.number(is_theirs), "line", lambda: log.remove(is_theirs))


def _line_of(cluster: str, runs: Runs) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: row.get("cluster") == cluster and (row.get("job_id"), row.get("submit_s")) in runs


def record_places(prolog: str, spool: str, cluster: str, spans: Mapping[int, tuple[int, int]]) -> Iterator[Kept]:
    """Records of the Prolog, and notices of ended jobs. spans: from and until when a job id is one of the user's."""

    def is_record(name: str) -> bool:
        match = _RECORD.fullmatch(name)
        span = spans.get(int(match["job"])) if match and match["cluster"].lower() == cluster.lower() else None
        return bool(match and span and span[0] <= int(match["time"]) <= span[1])

    def is_notice(name: str) -> bool:
        match = _NOTICE.fullmatch(name)
        return bool(match and int(match["job"]) in spans)

    if prolog:
        yield _files("records of the Prolog", [Path(prolog)], is_record)
    yield _files("notices of ended jobs", [Path(spool), Path(spool) / "bad"], is_notice)


def _files(place: str, folders: Collection[Path], is_theirs: Callable[[str], bool]) -> Kept:
    def remove() -> None:
        for folder in folders:
            names = _names(folder, is_theirs)
            if names:
                with opened(folder) as handle:
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=handle)

    return Kept(place, sum(len(_names(folder, is_theirs)) for folder in folders), "file", remove)


def _names(folder: Path, is_theirs: Callable[[str], bool]) -> list[str]:
    try:
        with opened(folder) as handle:
            return [name for name in os.listdir(handle) if is_theirs(name)]  # noqa: PTH208 - of a descriptor
    except (FileNotFoundError, NotADirectoryError):
        return []
