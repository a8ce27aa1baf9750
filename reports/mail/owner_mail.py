"""Mails of `almanac report JOBID --mail`: reports for the owners of some jobs, past the outbox."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from almanac.config import Config
from almanac.errors import ConfigError, NotAllowedError
from almanac.units import printable
from reports.job.context import JobContext
from reports.job.report import render_email
from reports.mail.address_book import AddressBook
from reports.mail.digest import render_burst
from reports.mail.message import compose
from reports.mail.outbox import EndedRun, Message
from reports.mail.pilot import is_in_pilot
from reports.mail.preferences import UNKNOWN, read

_PREVIEW = "send a preview to yourself with --to ADDRESS, or write the report to a file: --html FILE"


def owner_mails(
    contexts: Sequence[JobContext], config: Config, caller: str, now_s: int, preview_to: str = ""
) -> list[Message]:
    """One mail for each job, or for each user with more than mail.storm jobs.

    preview_to: where all mails go, instead of to the jobs' owners. The Message-ID differs from the one of the mail
    after the job, because mail clients would hide the second mail. Raises NotAllowedError for another user who
    wants no mail, perhaps, or is outside the pilot, ConfigError without an address, and AddressError.
    """
    by_user: dict[str, list[JobContext]] = defaultdict(list)
    for context in contexts:
        by_user[context.user].append(context)
    addresses, messages = AddressBook(config.mail), []
    for user, own in by_user.items():
        if not preview_to and user != caller:
            _refuse_unwanted(user, own, config)
        recipient = preview_to or _recipient(user, addresses)
        parts = [own] if len(own) > config.mail.storm else [[each] for each in own]
        messages += [_message(part, recipient, config, now_s) for part in parts]
    return messages


def _refuse_unwanted(user: str, own: Sequence[JobContext], config: Config) -> None:
    """Raises NotAllowedError for a user to whom an operator must not send mail."""
    wanted = read(user, config).frequency
    if wanted == UNKNOWN:
        said = f"the system does not know {printable(user)}, so whether they want mail is unknown"
        raise NotAllowedError(said, f"look up `getent passwd`, or {_PREVIEW}")
    if wanted == "off":
        raise NotAllowedError(f"{printable(user)} wants no mail", _PREVIEW)
    if not all(is_in_pilot(config.mail, user, each.job["account"] or "") for each in own):
        raise NotAllowedError(f"{printable(user)} is outside the pilot of mail.users and mail.accounts", _PREVIEW)


def _recipient(user: str, addresses: AddressBook) -> str:
    recipient = addresses.address(user)
    if recipient is None:
        said = f"{printable(user)} has no address by mail.address_map, mail.address_command, or mail.recipient"
        raise ConfigError(said, f"see `Who gets mail` in docs/mail.md, or {_PREVIEW}")
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
    rendered = render_email(contexts[0], config) if is_one else render_burst(contexts, config).rendered
    kind = "job" if is_one else "digest"
    return compose(rendered, runs, recipient, config, now_s, kind=kind, key=f"asked for at {now_s}")
