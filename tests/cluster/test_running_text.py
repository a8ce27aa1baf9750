"""squeue's fixed-width text of real running jobs says what its JSON does, whatever their users named them."""

from __future__ import annotations

import pytest
from site_commands import SiteCommands
from sites import Site

from slurm.queue import read_running
from slurm.running import read_running_text

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]
SAME = (
    "submit_s", "restarts", "user", "account", "partition", "node_count", "gpu_count", "start_s", "het_job_id",
    "het_offset", "array_job_id", "array_task_id",
)  # fmt: skip
NAMES = ("plain", "two\nlines", "1234567         1795877270      0", "ünïcödé", "x" * 300)


def test_text_and_json_of_running_jobs_agree(site: Site) -> None:
    options = ("--gpus=1", "-o", "/dev/null", "--time=10")
    script = "#!/bin/sh\nsleep 300\n"
    jobs = [site.sbatch("alice", *options, "-J", name, f"--comment={name}", script=script) for name in NAMES]
    jobs.append(site.sbatch("alice", "--gpus=1", "-o", "/dev/null", "--time=10", ":", "--gpus=1", script=script))
    jobs.append(site.sbatch("alice", *options, "--array=7", script=script))
    for job in jobs:
        site.wait_for(job, "RUNNING")
    commands = SiteCommands(site)
    try:
        rows, unreadable = read_running_text(commands)
        shown = {row["job_id"]: row for row in rows}
        assert unreadable == 0
        for job in read_running(commands, "").jobs:
            row = shown[job.job_id]
            for name in SAME:
                assert row[name] == getattr(job, name), name
            assert row["limit_end_s"] == row["start_s"] + 600
            assert (row["is_interactive"], row["is_shared"]) == (not job.is_batch, False)
            assert row["name"].strip() == job.name.encode()[:128].decode().strip()
        assert len(shown) == len(NAMES) + 3
        assert sum(row["het_job_id"] is not None for row in shown.values()) == 2
        comments = {row["comment"] for row in shown.values()}
        assert comments == {*(name.strip() for name in NAMES[:-1]), "", None}, "a comment that may be cut is not read"
    finally:
        site.run("ctl", "root", "scancel", *map(str, jobs))
