"""Mail about running jobs: to their owners, also before and after a cancel, and to the operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from advisor.watch.actions import DueStep, Step
from advisor.watch.round import MOST_KEPT_S
from almanac.config import Config
from almanac.errors import SourceError
from almanac.units import counted, format_duration, format_job_id, format_moment, printable
from reports.job.job_report import Suggestion
from reports.job.render import Rendered
from reports.mail.digest import Part, render_parts, site_given
from reports.mail.due import OUTSIDE, is_in_pilot
from reports.mail.handover import MailAgent, compose
from reports.mail.recipients import NOT_KNOWN, NOT_WANTED, UNKNOWN, AddressBook, AddressError, read
from slurm.sacct import NO_MAIL

OPERATORS = "operators"
_TITLES: Mapping[Step, str] = {
    "warn": "Jobs that will be cancelled", "cancel": "Jobs that were cancelled", "message": "Running jobs to look at",
    "operators": "Running jobs to look at",
}  # fmt: skip


@dataclass(frozen=True)
class WatchMail:
    """Hands mails about running jobs of a cluster to the mail server. clock: seconds since 1970, now."""

    config: Config
    cluster: str
    clock: Callable[[], int]

    @cached_property
    def addresses(self) -> AddressBook:
        return AddressBook(self.config.mail)

    def why_no_mail(self, job: Mapping[str, Any], step: Step) -> str:
        """Return why the owner of a job gets no mail about a step; "" if they do.

        Warnings of a cancel also go to those who want no reports: they lose a job otherwise.
        """
        user, mail = job["user"], self.config.mail
        if not mail.server:
            return "mail.server is empty"
        if not is_in_pilot(mail, user, job["account"]):
            return OUTSIDE
        if step == "message":
            frequency = read(user, self.config).frequency
            if frequency == UNKNOWN or frequency in NOT_WANTED:
                return NOT_WANTED.get(frequency, NOT_KNOWN)
            if NO_MAIL.search(job["comment"] or ""):
                return "almanac:nomail"
        try:
            return "" if self.addresses.address(user) else "its owner has no address"
        except AddressError:
            return "the address of its owner cannot be looked up now"

    def hand_over(self, reader: str, steps: Sequence[DueStep]) -> None:
        """Return once the server took one mail to a user, or to the operators (""). Raises SourceError, ConfigError."""
        recipient = self.addresses.address(reader) if reader else self.config.watch.operators_mail
        if not recipient:
            raise SourceError(f"no address for {printable(reader) or OPERATORS}", "see `almanac doctor`")
        rendered = render_steps(steps, self.config, self.cluster, self.clock())
        key = f"{self.clock()}-{steps[0].what}"
        message = compose(
            rendered, (), recipient, self.config, self.clock(), cluster=self.cluster, user=reader or OPERATORS,
            kind="watch", key=key,
        )  # fmt: skip
        with MailAgent(self.config.mail) as agent:
            agent.hand_over(message)


def render_steps(steps: Sequence[DueStep], config: Config, cluster: str, now_s: int) -> Rendered:
    """Render one mail about steps for one reader. The jobs that will be cancelled come first."""
    by_step = {what: [each for each in steps if each.what == what] for what in _TITLES}
    parts = [_part(what, own, now_s) for what, own in by_step.items() if own]
    subject, summary = _subject(by_step)
    kicker = f"{counted(len(steps), 'running job')} on {printable(cluster, 60)} at {format_moment(now_s)}"
    return render_parts(site_given(cluster, config, ()), subject, (summary,), kicker, parts)


def _subject(by_step: Mapping[Step, Sequence[DueStep]]) -> tuple[str, str]:
    """Return the subject and the first line, about the step that matters most."""
    what, own = next((what, own) for what, own in by_step.items() if own)
    kinds = Counter(each.finding.kind.replace("_", " ") for each in own)
    found = ", ".join(kind if len(own) == 1 else f"{number} {kind}" for kind, number in kinds.most_common())
    whose = f"Job {format_job_id(own[0].job)}" if len(own) == 1 else f"{len(own)} jobs"
    if what == "warn":
        until = format_moment(min(each.cancel_s for each in own))
        return f"{whose} will be cancelled after {until}: {found}", f"Use the GPUs, end the job, or keep it: {found}."
    if what == "cancel":
        done = "was" if len(own) == 1 else "were"
        return f"{whose} {done} cancelled: {found}", "The GPUs did no work for too long, and two mails said so."
    return f"{whose}: {found}", f"Look at {'this job' if len(own) == 1 else 'these jobs'} while it still helps."


def _part(what: Step, steps: Sequence[DueStep], now_s: int) -> Part:
    note = ""
    if what == "warn":
        note = (
            f"To keep a job for up to {format_duration(MOST_KEPT_S)} without work, set its comment, such as `scontrol "
            f"update jobid={format_job_id(steps[0].job)} comment=almanac:keep:8h`. "
            "Such a warning comes whatever mail you chose."
        )
    return Part(_TITLES[what], suggestions=tuple(_suggestions(steps, now_s)), note=note)


def _suggestions(steps: Sequence[DueStep], now_s: int) -> Iterator[Suggestion]:
    for each in steps:
        job, found = each.job, each.finding
        of = [
            f'"{printable(job["name"] or "", 40)}"',
            *([printable(job["user"], 40)] if each.what == OPERATORS else []),
        ]
        when = f"; not cancelled before {format_moment(each.cancel_s)}" if each.what == "warn" else ""
        age = format_duration(found.until_s - found.since_s)
        why = f"{found.kind.replace('_', ' ')} for {age} on {counted(job['gpu_count'], 'GPU')}, since "
        why += f"{format_moment(found.since_s)}; samples of {found.coverage:.0%} of that time"
        advice = f"Job {format_job_id(job)} ({', '.join(of)}){when}: {printable(found.says, 400)}"
        yield Suggestion(found.kind, advice, why)
