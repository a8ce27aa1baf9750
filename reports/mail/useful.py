"""What users who chose `useful` hear at once: failed jobs, idle GPUs, and advice that is new to them this week."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reports.job.rules import ALL_IDLE, SOME_IDLE
from reports.mail.families import DigestJob
from reports.mail.outbox_file import Told

IDLE_RULES = ALL_IDLE | SOME_IDLE
NOTHING_NEW = "nothing new: in the weekly digest"


@dataclass
class News:
    """told: what recent mails told each user. It grows with each job that is judged, so that advice is news once."""

    told: set[tuple[str, Told]]

    def has_any(self, user: str, jobs: Iterable[DigestJob]) -> bool:
        """Whether a mail about these jobs, such as the tasks of an array, is useful now."""
        news = [self._is_news(user, job) for job in jobs]  # of all jobs: each adds what it tells
        return any(news)

    def _is_news(self, user: str, job: DigestJob) -> bool:
        advice = {(user, job.told(each.rule)) for each in job.conclusions.suggestions}
        new = advice - self.told
        self.told |= new
        return bool(job.has_failed or new or not IDLE_RULES.isdisjoint(job.conclusions.rules))
