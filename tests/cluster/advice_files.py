"""Advice files and hook scripts on a site, as the publisher and the installer leave them there."""

from __future__ import annotations

import time
from typing import Any

from sites import Site

from almanac.config import Priority, Tier
from slurm_hooks.advice.file import ADVICE, AdviceFile, AdviceRow
from slurm_hooks.advice.sched import render

TIERS = (
    Tier(name="hbm40g", capacity_mib=40960, constraint="hbm40g"),
    Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),
)
TEXT = 'your last 14 runs of "train-bert-#" peaked at 21.3 GiB per GPU'
SCRIPT = """
function slurm_job_submit(job_desc, part_list, submit_uid)
{before}
{line}
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def advice_file(
    *rows: AdviceRow,
    mode: str = "apply",
    tell: bool = False,
    version: str = "v1",
    lasts_s: int = 3600,
    prompt: str = "off",
    tiers: tuple[Tier, ...] = TIERS,
) -> AdviceFile:
    """A file written now, with K 1000, least GPU-time 60 and greatest 8,640,000."""
    now_s = int(time.time())
    return AdviceFile(
        version=version,
        written_s=now_s,
        expires_s=now_s + lasts_s,
        mode=mode,
        tell=tell,
        prompt=prompt,
        priority=Priority(points_per_e=1000, min_gpu_time_s=60, max_gpu_time_s=8_640_000),
        tiers=tiers,
        rows=rows,
    )


def advice(*rows: AdviceRow, **more: Any) -> bytes:
    """Return the lines of advice_file, for sched/."""
    return render(advice_file(*rows, **more))


def shown_advice(*rows: AdviceRow, **more: Any) -> bytes:
    """Return the same as users' programs read it."""
    return ADVICE.render(advice_file(*rows, **more))


def family(key: str, gpus: int, site_factor: int, **more: object) -> AdviceRow:
    return AdviceRow("F", 3600, site_factor, key, gpus, **more)  # type: ignore[arg-type]


def publish(site: Site, name: str, data: bytes) -> str:
    """Puts a file where slurmctld looks for it, readable by SlurmUser only; returns its path."""
    folder = f"{site.advice_dir}/sched"
    site.run("ctl", "root", "install", "-d", "-o", "root", "-g", "slurm", "-m", "0750", folder)
    path = f"{folder}/{name}"
    site.write("ctl", path, data, mode=0o640)
    site.run("ctl", "root", "chgrp", "slurm", path)
    return path


def uid_of(site: Site, user: str) -> str:
    return site.run("ctl", "root", "id", "-u", user).stdout.strip()


def guarded_line(site: Site) -> str:
    """The one line of a site's script, but for where modules and files are."""
    module = f"{site.lua_dir}/job_submit.lua"
    return f'pcall(function() dofile("{module}").submit(job_desc, submit_uid, {{advice = "{site.advice_dir}"}}) end)'


def hook_on(site: Site, before: str = "") -> None:
    """Gives the site a job_submit.lua with the guarded line, and Lua lines before it."""
    site.hook("job_submit", SCRIPT.format(before=before, line=guarded_line(site)))
