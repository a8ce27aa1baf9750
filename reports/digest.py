"""Mails of several jobs: a storm of them, such as an array's tasks, and a user's week."""

from __future__ import annotations

from collections.abc import Sequence

from almanac.config import Config
from reports.context import JobContext
from reports.job_report import Rendered
from telemetry.store import Store


def render_storm(contexts: Sequence[JobContext], config: Config) -> Rendered:
    """One mail of many jobs of one user; contexts may lack their series. At least one."""
    raise NotImplementedError


def render_weekly(store: Store, cluster: str, user: str, config: Config, now_s: int) -> Rendered | None:
    """The GPU jobs that ended within the seven days before now; None where there were none. Raises StoreError."""
    raise NotImplementedError
