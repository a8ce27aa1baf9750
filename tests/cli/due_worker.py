"""Runs of `almanac mail run` that end with SIGKILL at their nth step: due_worker.py ROOT PORT; step 0 is never.

A step is a statement of the record, a command to the mail server or its reply, or the rename or removal of a file. The
result of a run is the number of its steps, and its faults. With fill, the disk is full from that step on instead, and
a run that fails for it tells why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import smtplib
import sqlite3
import sys
from pathlib import Path
from typing import Any

import duckdb
import one_duckdb
from due_site import NOW_S, Site, know_everybody, scenario, site_of
from forks import serve

from almanac.errors import AlmanacError

steps = 0
kill_at = 0
fill = ""


def step(*_: Any) -> None:
    global steps
    steps += 1
    if steps != kill_at:
        return
    if not fill:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError), Path(fill).open("wb", buffering=0) as ballast:
        while ballast.write(bytes(512)):
            pass


def traced(*given: Any, **options: Any) -> sqlite3.Connection:
    database = connect(*given, **options)
    database.set_trace_callback(step)
    return database


def renamed(path: Path, target: Path) -> Path:
    step()
    return rename(path, target)


def spoken(server: smtplib.SMTP, given: Any) -> None:
    step()
    send(server, given)
    step()


def heard(server: smtplib.SMTP) -> tuple[int, bytes]:
    step()
    reply = getreply(server)
    step()
    return reply


def removed(path: Path, missing_ok: bool = False) -> None:
    step()
    unlink(path, missing_ok)


send, getreply = smtplib.SMTP.send, smtplib.SMTP.getreply
smtplib.SMTP.send, smtplib.SMTP.getreply = spoken, heard  # type: ignore[method-assign]
connect, rename, unlink = sqlite3.connect, Path.replace, Path.unlink
sqlite3.connect, Path.replace, Path.unlink = traced, renamed, removed  # type: ignore[assignment, method-assign]


class Port:
    port = int(sys.argv[2])


def run(number: int, full: str = "", at_s: int = NOW_S + 300, **mail: Any) -> str:
    global kill_at, fill
    kill_at, fill = number, full
    site: Site = site_of(Path(sys.argv[1]), Port())  # type: ignore[arg-type]
    site.change("mail", **mail)
    scenario(site)
    try:
        faults = site.due(at_s).faults
    except (AlmanacError, OSError) as error:
        if not full:
            raise
        return f"{error}"
    return f"{steps} {faults}"


know_everybody()
duckdb.connect = one_duckdb.connect  # type: ignore[assignment]
serve(run)
