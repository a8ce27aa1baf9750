"""`almanac mail`: how often the caller wants reports by mail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from cli.app import App

if TYPE_CHECKING:
    from reports.mail.preferences import Preference

WORDS = {
    "every": "one mail after each GPU job, or one for a burst of jobs",
    "digest": "one mail a week about all of your GPU jobs",
    "off": "no mail",
}


@click.command("mail")
@click.argument("frequency", required=False, type=click.Choice([*WORDS, "default"]), metavar="[every|digest|off]")
@click.pass_obj
def command(app: App, frequency: str | None) -> None:
    """Show how often you get reports by mail, or choose it.

    every: after every GPU job; digest: once a week; off: never; default: what the site has chosen. Your choice is
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
    if not app.config.mail.server:
        click.echo("This site sends no mail: mail.server is not set in almanac's configuration.")
