"""Rules that every backend keeps (slurm/backend.py). Run on recorded outputs, on real clusters, and by
pyslurm_check.py on a real pyslurm. Plain functions with asserts: no pytest here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from almanac.records import Counts
from slurm.backend import SlurmBackend
from slurm.queued_job import QueuedJob

BASE_STATES = {"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN"}
"""slurm.h, node_states."""


def check_reading(backend: SlurmBackend) -> list[QueuedJob]:
    """Check that a cluster's answers fit together, whatever it holds. Returns the pending jobs."""
    assert backend.cluster()
    assert {"ClusterName", "PriorityType"} <= backend.settings().keys()
    counts = Counts()
    jobs = backend.pending(counts)
    assert counts.seen == counts.kept == len(jobs), counts.dropped
    assert [job.job_id for job in jobs] == sorted({job.job_id for job in jobs})
    assert len({job.address for job in jobs}) == len(jobs)
    for job in jobs:
        _check_job(job)
    factors = backend.site_factors()
    held = {job.job_id for job in jobs if job.is_held}
    assert not held & set(factors), "a held job is not ranked"
    nodes = backend.nodes()
    assert [node.name for node in nodes] == sorted(node.name for node in nodes)
    for node in nodes:
        assert len(node.states & BASE_STATES) == 1, f"{node.name}: {sorted(node.states)}"
        assert all(state == state.upper() and state.replace("_", "").isalpha() for state in node.states)
    return jobs


def _check_job(job: QueuedJob) -> None:
    assert job.user
    assert job.submit_s > 1_000_000_000, "seconds since 1970"
    assert job.gpu_count >= 0
    assert min(job.node_count, job.cpu_count) >= 1
    assert job.time_limit_s is None or job.time_limit_s % 60 == 0
    assert (job.het_job_id is None) == (job.het_offset is None)
    if job.array_task_id is not None:
        assert job.address == f"{job.array_job_id}_{job.array_task_id}"
    elif job.array_job_id is not None:
        assert job.address.split("_")[0] == str(job.array_job_id)
    elif job.het_job_id is not None:
        assert job.address == f"{job.het_job_id}+{job.het_offset}"
    else:
        assert job.address == str(job.job_id)


def check_acting(backend: SlurmBackend, job_ids: Sequence[int]) -> None:
    """Of these pending jobs, each ranked and without an explicit priority: each gets a factor of its own, no other job
    is touched, 0 and less than 0 can be told, and a job that is not there spoils nothing.
    """
    jobs = {job.job_id: job for job in backend.pending(Counts())}
    chosen = [jobs[job_id] for job_id in job_ids]
    before = backend.site_factors()
    assert not any(before[job.job_id].is_explicit for job in chosen)
    absent = QueuedJob(4_000_000, "4000000", 1_000_000_001, "nobody", "absent")
    wanted = {job.job_id: 1000 + place for place, job in enumerate(chosen)}
    said = backend.set_site_factors(
        [replace(absent, site_factor=7), *(replace(job, site_factor=wanted[job.job_id]) for job in chosen)]
    )
    assert said, "Slurm says that a job is not there"
    after = {job_id: factor.value for job_id, factor in backend.site_factors().items()}
    assert after == {job_id: wanted.get(job_id, factor.value) for job_id, factor in before.items()}
    for site_factor in (-3, 0):
        assert backend.set_site_factors([replace(job, site_factor=site_factor) for job in chosen]) == []
        told = backend.site_factors()
        assert [told[job.job_id].value for job in chosen] == [site_factor] * len(chosen)
    assert backend.set_site_factors([replace(job, site_factor=before[job.job_id].value) for job in chosen]) == []
    assert backend.set_site_factors([]) == []
