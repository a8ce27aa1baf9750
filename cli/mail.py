"""`almanac mail`: how often the caller wants reports by mail."""

from __future__ import annotations

import os
import socket
import textwrap
from typing import TYPE_CHECKING

import click

from almanac.units import DAY_S, format_duration, printable
from cli.app import App

if TYPE_CHECKING:
    from reports.mail.preferences import Preference

WORDS = {
    "every": "one mail after each GPU job, or one for a burst of jobs",
    "useful": "a mail at once about failed jobs, idle GPUs, and new advice; the rest once a week",
    "digest": "one mail a week about all of your GPU jobs",
    "off": "no mail",
}
STALE_S = DAY_S
"""The timer runs every minute; a choice made while it is down for a while still counts."""
UNTIL = "Until then, for no mail about a job: sbatch --comment=almanac:nomail"


@click.command("mail")
@click.argument(
    "frequency", required=False, type=click.Choice([*WORDS, "default"]), metavar="[every|useful|digest|off]"
)
@click.pass_obj
def command(app: App, frequency: str | None) -> None:
    """Show how often you get reports by mail, or choose it.

    every: after every GPU job; useful: at once if a job failed, left GPUs idle, or gives advice that is new to you this
    week, and the rest once a week; digest: once a week; off: never; default: what the site has chosen. Your choice is
    yours alone, and holds until you make another. For one job: sbatch --comment=almanac:nomail.
    """
    from reports.mail.preferences import read, write

    if frequency is not None:
        write(None if frequency == "default" else frequency, app.config)
    _say(app, read(app.caller, app.config, lambda user: os.getuid()))


def _say(app: App, preference: Preference) -> None:
    if preference.frequency not in WORDS:
        click.echo("unknown: you cannot read your own choice; choose again (no mail is sent to you until then)")
        return
    whose = "your choice" if preference.is_own else "this site's default"
    click.echo(f"{preference.frequency}: {WORDS[preference.frequency]} ({whose})")
    mail = app.config.mail
    if (mail.users or mail.accounts) and app.caller not in mail.users:
        click.echo("This site sends mail only to some users and accounts so far.")
    for said in _reader_lines(app, preference.is_own):
        click.echo(textwrap.fill(said, 80, break_long_words=False, break_on_hyphens=False))


def _reader_lines(app: App, is_own: bool) -> list[str]:
    """What the user has to know if no mail timer reads the choices that are made on this host; [] if one does."""
    from reports.mail.last_read import last_read
    from reports.mail.preferences import folder_of

    folder, host = folder_of(app.config), printable(socket.gethostname(), 60)
    if not folder.is_dir():
        return [
            f"No choice can be kept on {host}: {folder} does not exist.",
            "Ask the operators where to run this.",
            UNTIL,
        ]
    found = last_read(folder)
    if found is None and not app.config.mail.server:
        return [
            f"This site sends no mail, as far as {host} knows: its configuration sets no mail.server.",
            *((f"If you do get mail, ask the operators where to run this. {UNTIL}",) if is_own else ()),
        ]
    if not is_own or (found and app.now_s() - found.time_s < STALE_S):
        return []
    if found is None:
        return [
            f"It is stored on {host}, but nothing that sends mail has read it yet.",
            "In an hour, run this again: almanac mail",
            f"If it is still so, tell the operators that no mail timer reads {folder} of {host}.",
            UNTIL,
        ]
    ago = format_duration(app.now_s() - found.time_s)
    return [
        f"It is stored on {host}, but nothing that sends mail has read it for {ago}.",
        f"Tell the operators that the mail timer of {found.host} no longer reads {folder}.",
        UNTIL,
    ]
