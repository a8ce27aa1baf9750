"""`almanac forget`: remove everything that almanac keeps of one person."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from almanac.errors import NotAllowedError, StoreError
from almanac.published.outgoing import name_of, uid_of
from almanac.units import counted, format_moment, printable, valid_unicode
from cli.app import App
from cli.forget_places import Person, find, manifest_uids, remove
from cli.output import json_text, show_table
from telemetry.store.forgotten import Forgetting, read_forgotten, write_forgotten

if TYPE_CHECKING:
    from cli.forget_places import KeptData, RemovalFailure
    from telemetry.store.store import Store

ELSEWHERE = (
    "Not covered: Slurm's accounting, mails that were sent, backups, system logs,\n"
    "files that you wrote elsewhere (reports, tables, mail.users and the address map\n"
    "of the configuration), and copies on other hosts."
)


@click.command("forget")
@click.argument("user")
@click.option("--yes", is_flag=True, help="Remove it. Without this option, only show what would be removed.")
@click.option("--uid", type=click.IntRange(0, 2**32 - 2), help="uid of a user who has no account on this host now.")
@click.option("--json", "as_json", is_flag=True, help="Print the places and numbers as JSON.")
@click.pass_obj
def command(app: App, user: str, yes: bool, uid: int | None, as_json: bool) -> int:
    """Remove everything that almanac keeps of USER, on all clusters of the store. For the store's owner and root.

    That is the user's jobs with their metrics, advice, mails, published files, choice of mail, and traces in models and
    logs. Samples of GPUs stay, without the numbers of the user's jobs. Without --yes this is a dry run.

    Jobs that the user submitted before now stay out of the store: later runs of `almanac ingest` leave them out. The
    exit code is 4 if anything could not be removed; run the command again then.
    """
    app.require_operator("only operators remove what is kept of a user")
    if not user or user != valid_unicode(user) or not user.isprintable():
        raise click.UsageError(f"{printable(ascii(user), 80)} is not a user name")
    if app.cluster_name:
        raise click.UsageError("a user is forgotten on all clusters: leave out --cluster")
    store = app.open_store()
    who = _person(app, user, uid)
    failures: list[RemovalFailure] = []
    before_s = app.now_s()
    if yes:
        _require_owner(store)
        _remember(store, user, Forgetting(before_s))
    found = find(store, app.config, who)
    if yes:
        failures = remove(found)
        if not failures:
            _remember(store, user, Forgetting(before_s, before_s))
    found.sort(key=lambda kept: kept.place.name != "jobs")
    if as_json:
        click.echo(json_text(_document(who, found, failures, before_s if yes else None)))
    else:
        _show(who, found, failures, before_s if yes else None, uid)
    return StoreError.exit_code if failures else 0


def _require_owner(store: Store) -> None:
    if os.geteuid() not in (0, store.root.stat().st_uid):
        raise NotAllowedError(f"{store.root} belongs to another user", "run this as root, or as the store's owner")


def _remember(store: Store, user: str, forgetting: Forgetting) -> None:
    """Note the person before anything is removed, and once nothing is left."""
    with store.lock():
        write_forgotten(store.root, read_forgotten(store.root).with_person(user, forgetting))


def _person(app: App, user: str, uid: int | None) -> Person:
    """The person with every uid under which files may be published. Raises UsageError for another user's uid."""
    if uid is not None and name_of(uid) not in (None, user):
        raise click.UsageError(f"uid {uid} belongs to {printable(name_of(uid) or '', 80)}: give that of {user}")
    listed = {each for each in manifest_uids(app.store_root, user) if name_of(each) in (None, user)}
    known = {each for each in (uid, uid_of(user)) if each is not None}
    return Person(user, tuple(sorted(listed | known)))


def _document(
    who: Person, kept: list[KeptData], failures: list[RemovalFailure], before_s: int | None
) -> dict[str, object]:
    return {
        "user": who.name,
        "uids": list(who.uids),
        "removed": before_s is not None,
        "left_out_before_s": before_s,
        "places": [
            {
                "cluster": each.area.cluster,
                "place": each.place.name,
                "number": each.number,
                "noun": each.place.noun,
            }
            for each in kept
        ],
        "failures": [vars(failure) for failure in failures],
    }


def _show(
    who: Person, kept: list[KeptData], failures: list[RemovalFailure], before_s: int | None, given_uid: int | None
) -> None:
    found = [each for each in kept if each.number]
    if found:
        click.echo(f"almanac {'kept' if before_s else 'keeps'} this of {_described(who)}:\n")
        show_table(
            ["cluster", "place", "what"],
            [[each.area.cluster or "-", each.place.name, counted(each.number, each.place.noun)] for each in found],
        )
        click.echo("")
    else:
        click.echo(f"almanac keeps nothing of {_described(who)}.")
    if not who.uids:
        click.echo(f"{who.name} has no account here. If files were published for them, add --uid N.")
    if before_s is None:
        if found:
            click.echo(f"Nothing was removed. To remove all of it: {_again(who.name, given_uid)}")
    elif failures:
        click.echo("Not all of it is removed.")
        for failure in failures:
            click.echo(f"error: {failure.place}: {printable(failure.error, 1000)}", err=True)
            click.echo(f"try: {printable(failure.todo, 1000)}; then run this again", err=True)
    else:
        all_of_it = "All of it is removed. " if found else ""
        click.echo(f"{all_of_it}Jobs submitted before {format_moment(before_s)} stay out of the store.")
    if found:
        click.echo(ELSEWHERE)


def _again(name: str, uid: int | None) -> str:
    """The command that removes, fit for a shell; "--" only before a name that looks like an option."""
    given = "" if uid is None else f" --uid {uid}"
    return f"almanac forget{given} --yes {'-- ' if name.startswith('-') else ''}{shlex.quote(name)}"


def _described(who: Person) -> str:
    uids = ", ".join(map(str, who.uids))
    return f"{who.name} (uid {uids})" if uids else who.name
