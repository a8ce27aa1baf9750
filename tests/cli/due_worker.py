"""Runs of `almanac report --due` that end with SIGKILL at their nth step: due_worker.py ROOT PORT; step 0 is never.

A step is a statement of the outbox, or the rename or removal of a file. The result of a run is the number of its steps.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from due_site import NOW_S, Site, know_everybody, scenario, site_of
from forks import serve

# The timer imports these late; here, once for all runs.
import reports.mail.delivery  # noqa: F401
import telemetry.metrics.summary  # noqa: F401

steps = 0
kill_at = 0


def step(*_: Any) -> None:
    global steps
    steps += 1
    if steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def traced(*given: Any, **options: Any) -> sqlite3.Connection:
    database = connect(*given, **options)
    database.set_trace_callback(step)
    return database


def renamed(path: Path, target: Path) -> Path:
    step()
    return rename(path, target)


def removed(path: Path, missing_ok: bool = False) -> None:
    step()
    unlink(path, missing_ok)


connect, rename, unlink = sqlite3.connect, Path.replace, Path.unlink
sqlite3.connect, Path.replace, Path.unlink = traced, renamed, removed  # type: ignore[assignment, method-assign]


class Port:
    port = int(sys.argv[2])


def run(number: int, **mail: Any) -> int:
    global kill_at
    kill_at = number
    site: Site = site_of(Path(sys.argv[1]), Port())  # type: ignore[arg-type]
    site.change("mail", **mail)
    scenario(site)
    site.due(NOW_S + 300)
    return steps


know_everybody()
serve(run)
