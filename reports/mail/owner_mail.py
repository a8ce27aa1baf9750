"""Mails of `almanac report JOBID --mail`: reports for the owners of some jobs, past the outbox."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from almanac.config import Config
from almanac.errors import ConfigError, NotAllowedError
from almanac.units import printable
from reports.job.context import JobContext
from reports.job.report import render_email
from reports.mail.digest import render_burst
from reports.mail.message import compose, recipient_of
from reports.mail.outbox import EndedRun, Message
from reports.mail.preferences import UNKNOWN, read


def owner_mails(contexts: Sequence[JobContext], config: Config, caller: str, now_s: int) -> list[Message]:
    """One mail for each job, or for each user with more than mail.storm jobs.

    The Message-ID differs from the one of the mail after the job, because mail clients would hide the second mail.
    Raises NotAllowedError for another user who may want no mail, ConfigError without an address.
    """
    by_user: dict[str, list[JobContext]] = defaultdict(list)
    for context in contexts:
        by_user[context.user].append(context)
    messages = []
    for user, own in by_user.items():
        recipient = _recipient(user, config, caller)
        parts = [own] if len(own) > config.mail.storm else [[each] for each in own]
        messages += [_message(part, recipient, config, now_s) for part in parts]
    return messages


def _recipient(user: str, config: Config, caller: str) -> str:
    wanted = "every" if user == caller else read(user, config).frequency
    if wanted == UNKNOWN:
        said = f"the system does not know {printable(user)}, so whether they want mail is unknown"
        raise NotAllowedError(said, "look up `getent passwd`, or write the report to a file: --html FILE")
    if wanted == "off":
        raise NotAllowedError(f"{printable(user)} wants no mail", "write the report to a file: --html FILE")
    recipient = recipient_of(user, config)
    if recipient is None:
        raise ConfigError(f"mail.recipient gives no address of {printable(user)}", "see mail.recipient in the docs")
    return recipient


def _message(contexts: Sequence[JobContext], recipient: str, config: Config, now_s: int) -> Message:
    runs = [
        EndedRun(
            cluster=context.cluster,
            job_id=context.job_id,
            submit_s=context.job["submit_s"],
            user=context.user,
            end_s=context.job["end_s"] or now_s,
            gpu_count=context.gpu_count,
            array_job_id=context.job["array_job_id"],
        )
        for context in contexts
    ]
    is_one = len(contexts) == 1
    rendered = render_email(contexts[0], config) if is_one else render_burst(contexts, config)
    kind = "job" if is_one else "digest"
    return compose(rendered, runs, recipient, config, now_s, kind=kind, key=f"asked for at {now_s}")
