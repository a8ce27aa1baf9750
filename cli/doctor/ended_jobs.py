"""`almanac doctor` on the hook for ended jobs: its folder, and whether Slurm calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from almanac.errors import AlmanacError
from almanac.units import format_count, format_duration
from cli.app import App
from cli.doctor.findings import Check

NAME = "ended jobs"
LATE_S = 900
_SLOW = "reports go out after the next `almanac ingest`"


def check_spool(app: App) -> Iterator[Check]:
    """It is fine if the hook is not installed: accounting says the same, later."""
    from reports.mail.mail_site import spool_of
    from telemetry.slurm.spool import BAD

    if not app.config.mail.server or not app.store_root.exists():
        return
    spool = spool_of(app.config, app.store_root, "")
    if not spool.is_there:
        yield Check(NAME, "ok", f"{app.config.mail.spool_dir or 'mail.spool_dir'} does not exist: {_SLOW}")
        return
    try:
        spool.trusted_owners()
        files = spool.waiting()
        bad = spool.count_bad()
    except (AlmanacError, OSError) as error:
        yield Check(NAME, "fail", str(error), getattr(error, "hint", "") or "run doctor as root")
        return
    said = f"{spool.folder}: {format_count(len(files))} files waiting, {format_count(bad)} excluded, in {BAD}/"
    late_s = app.now_s() - min((_written_s(file, app.now_s()) for file in files), default=app.now_s())
    if late_s > LATE_S:
        yield Check(NAME, "warn", f"{said}; the oldest is {format_duration(late_s)} old",
                    "run `almanac report --due` to see why")  # fmt: skip
    elif bad:
        yield Check(NAME, "warn", said, "look at them: only SlurmUser, root, and almanac's group can write there")
    else:
        yield Check(NAME, "ok", said)
    yield from _check_slurm(app)


def _written_s(file: Path, gone_s: int) -> int:
    try:
        return int(file.lstat().st_mtime)
    except OSError:
        return gone_s


def _check_slurm(app: App) -> Iterator[Check]:
    """Whether Slurm calls any program when a job ends; a site's own script may call ours."""
    from telemetry.slurm.commands import controller_config

    try:
        told = controller_config(app.commands)
    except AlmanacError:
        return  # the check of Slurm reports it
    if not re.search(r"^(EpilogSlurmctld|JobCompLoc)\S*\s*=\s*[^(\s]", told, re.MULTILINE):
        todo = "on the controller, as root: almanac install-hooks --ended"
        yield Check(NAME, "warn", f"Slurm calls no program when a job ends: {_SLOW}", todo)
