"""`almanac doctor` on the site's choices for mail and reports: addresses, the pilot, and rules.toml."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from almanac.errors import AlmanacError
from almanac.trusted_file import trust_fault
from almanac.units import format_count, listed, printable
from cli.app import App
from cli.doctor.findings import Check

ADDRESSES, PILOT, RULES = "mail addresses", "mail pilot", "report rules"


def check_rules(app: App) -> Iterator[Check]:
    """Says nothing if the site has no rules.toml."""
    from reports.job.rules import packaged
    from reports.job.site_rules import rules_of, rules_path

    path = rules_path(app.config)
    if path is None:
        return
    try:
        found = rules_of(app.config)
    except AlmanacError as error:
        todo = f"{error.hint}; until then, mails and users' reports have the packaged rules"
        yield Check(RULES, "fail", str(error), todo)
        return
    before = {rule.name: rule for rule in packaged().rules}
    changed = sum(before[rule.name] != rule for rule in found.rules)
    removed = len(before) - len(found.rules)
    yield Check(RULES, "ok", f"{path} changes {format_count(changed)} rules and removes {format_count(removed)}")


def check_mail_settings(app: App) -> Iterator[Check]:
    """Says nothing if every user gets mail at the address of mail.recipient."""
    if app.config.mail.address_map:
        yield _check_map(app)
    if app.config.mail.address_command:
        yield _check_command(app)
    if app.config.mail.users or app.config.mail.accounts:
        yield _check_pilot(app)


def _check_map(app: App) -> Check:
    from almanac.addresses import is_address
    from reports.mail.address_book import read_map

    path = Path(app.config.mail.address_map)
    try:
        found = read_map(path)
    except AlmanacError as error:
        return Check(ADDRESSES, "fail", str(error), f"{error.hint}; until then, all mail waits")
    bad = [
        f"{printable(user, 40)} {printable(address, 80)}" for user, address in found.items() if not is_address(address)
    ]
    if bad:
        said = f"{path}: {listed(bad, 'user')} without one valid address: their mail waits"
        return Check(ADDRESSES, "warn", said, "write one address for each user, as in: alice alice@example.org")
    return Check(ADDRESSES, "ok", f"{path} has the addresses of {format_count(len(found))} users")


def _check_command(app: App) -> Check:
    from reports.mail.address_book import AddressBook

    program = Path(app.config.mail.address_command[0])
    try:
        about = program.stat()
    except OSError as error:
        return Check(ADDRESSES, "fail", f"{program}: {error.strerror}", "correct mail.address_command")
    if not stat.S_ISREG(about.st_mode) or not os.access(program, os.X_OK):
        return Check(ADDRESSES, "fail", f"{program} is not a program that can run", f"chmod 755 {program}")
    if fault := trust_fault(program):
        return Check(ADDRESSES, "fail", str(fault), fault.hint)
    try:
        address = AddressBook(app.config.mail).address(app.caller)
    except AlmanacError as error:
        return Check(ADDRESSES, "warn", str(error), error.hint)
    return Check(ADDRESSES, "ok", f"{program} gives {app.caller} {address or 'no address'}")


def _check_pilot(app: App) -> Check:
    from reports.mail.preferences import uid_of

    mail = app.config.mail
    unknown = [printable(user, 40) for user in mail.users if uid_of(user) is None]
    if unknown:
        said = f"mail.users names {listed(unknown, 'user')} that this host does not know"
        return Check(PILOT, "warn", said, "correct mail.users; see `getent passwd`")
    who = f"{format_count(len(mail.users))} users and {format_count(len(mail.accounts))} accounts"
    return Check(PILOT, "ok", f"only {who} get mail (mail.users, mail.accounts)")
