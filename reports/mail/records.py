"""What the outbox holds: runs that have ended, and messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EndedRun:
    """A run of a job that has ended. If a job is requeued, its next run has another submit or end time.

    Times come from the table jobs only. The clock of a hook can differ by a second, which would make another run.
    """

    cluster: str
    job_id: int
    submit_s: int
    user: str
    end_s: int
    gpu_count: int
    array_job_id: int | None = None


@dataclass(frozen=True)
class Message:
    """A mail, as the bytes that the server gets. kind: "job", "digest" (a burst of jobs), or "weekly".

    runs: the runs that it reports; () for a weekly one. attempts: tries that were begun. put_s: when it was queued.
    """

    message_id: str
    user: str
    recipient: str
    kind: str
    raw: bytes
    runs: tuple[EndedRun, ...] = ()
    attempts: int = 0
    next_try_s: int = 0
    put_s: int = 0
