"""`almanac doctor` on mail: server, addresses, record, preferences, rules.toml, and the hook for ended jobs."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import AlmanacError, NotAllowedError, ServerError
from almanac.files import trust_fault
from almanac.names import is_address
from almanac.units import format_count, format_duration, listed, printable
from cli.app import App
from cli.doctor import Check, first_few
from reports.job.rules import packaged, rules_of, rules_path
from reports.mail.handover import MailAgent, is_program, name_of, sender_of
from reports.mail.recipients import (
    FOLDER_MODE,
    LAST_READ,
    READABLE_FOLDER_MODE,
    AddressBook,
    folder_of,
    is_from_service,
    read_map,
    uid_of,
)
from reports.mail.record import read_counts, record_path
from reports.mail.run import spool_of
from slurm.commands import slurm_settings
from telemetry.sources.hook_records import BAD

MAIL, RECORD, ADDRESSES, PILOT = "mail", "mail record", "mail addresses", "mail pilot"
RULES, ENDED = "report rules", "ended jobs"
_SLOW = "reports go out after the next `almanac ingest`"
LATE_SPOOL_S = 900
_SHOWN = 5
MOST_BYTES = 1 << 20
"""Doctor warns about users who use more disk space than this. A choice takes 4 KiB."""
HARDLINKS = Path("/proc/sys/fs/protected_hardlinks")


def check_mail(app: App) -> Iterator[Check]:
    """Check mail: server, password, settings, record, and choices. It is fine if no server is set: no mail is sent."""
    if not app.config.mail.server:
        yield Check(MAIL, "ok", "mail.server is not set: no mail is sent")
        return
    yield from _check_server(app)
    yield from _check_password(app)
    yield from check_mail_settings(app)
    yield from _check_record(app)
    yield from _check_preferences(app)
    yield from _check_comments(app)


def _check_server(app: App) -> Iterator[Check]:
    config = app.config.mail
    try:
        with MailAgent(config) as agent:
            agent.open()
        said = "can run" if is_program(config) else f"answers ({config.security})"
        yield Check(MAIL, "ok", f"{name_of(config)} {said}; mail is sent from {sender_of(config)}")
    except ServerError as error:
        yield Check(MAIL, "fail", str(error), "correct server, port, security, ca_file, or login under [mail]")
    except AlmanacError as error:
        yield Check(MAIL, "fail", str(error), error.hint)
    if is_program(config):
        yield from _check_set_id(Path(config.server))


def _check_set_id(program: Path) -> Iterator[Check]:
    """The unit almanac.service sets NoNewPrivileges, so a set-ID program in it runs without its rights."""
    for path in (program, program.with_name("postdrop")):
        with contextlib.suppress(OSError):
            if path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
                said = f"{path} is set-user-ID or set-group-ID: it cannot queue mail from almanac.service"
                yield Check(MAIL, "warn", f"{said} (NoNewPrivileges)", 'set mail.server = "localhost"')
                return


def _check_password(app: App) -> Iterator[Check]:
    path = Path(app.config.mail.password_file)
    if app.config.mail.username and path.is_file() and path.stat().st_mode & 0o007:
        yield Check(MAIL, "fail", f"{path} is readable by everybody", f"chmod 640 {path}")


def _check_record(app: App) -> Iterator[Check]:
    try:
        counts = read_counts(record_path(app.store_root))
    except NotAllowedError as error:
        yield Check(RECORD, "warn", str(error), error.hint)
        return
    if counts is None:
        yield Check(RECORD, "warn", "nothing was ever sent", "run `almanac mail run` on a timer")
        return
    said = (
        f"{format_count(sum(counts.sent.values()))} mails sent, {format_count(counts.refused)} refused and due again, "
        f"{format_count(counts.given_up)} jobs given up; {format_count(counts.waiting)} jobs not decided yet"
    )
    details = {"sent": dict(counts.sent), "refused": counts.refused, "given_up": counts.given_up,
               "failed_tries": counts.failed_tries, "waiting": counts.waiting}  # fmt: skip
    if counts.words:
        said = f"{said}; the last refusal: {printable(counts.words, 300)}"
        yield Check(RECORD, "warn", said, "see the log of the mail server, or correct the address", details)
    else:
        yield Check(RECORD, "ok", said, "", details)


def _check_preferences(app: App) -> Iterator[Check]:
    folder, name, service = folder_of(app.config), "mail preferences", _service(app)
    todo = f"as root: mkdir -p {folder}; chown root:{service.group} {folder}; chmod {FOLDER_MODE:o} {folder}"
    try:
        found = folder.lstat()
    except FileNotFoundError:
        yield Check(name, "warn", f"{folder} does not exist: users cannot choose", todo)
        return
    except PermissionError:
        yield Check(name, "warn", f"{folder} cannot be read", "run doctor as root")
        return
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0:
        yield Check(name, "fail", f"{folder} is not a folder owned by root: its owner can choose for everybody", todo)
    elif mode == READABLE_FOLDER_MODE:
        yield Check(name, "warn", f"{folder} has mode {mode:04o}: users can read each other's choices", todo)
    elif mode != FOLDER_MODE:
        yield Check(name, "fail", f"{folder} has mode {mode:04o}, expected {FOLDER_MODE:04o}", todo)
    elif service.uid != 0 and found.st_gid not in service.gids:
        said = f"{folder} has group {found.st_gid}: the store's owner is not in it, and cannot read the choices"
        yield Check(name, "fail", said, todo)
    else:
        yield from _check_squatters(folder, name)
    yield from _check_hardlinks(name)


@dataclass(frozen=True)
class _Service:
    """The store's owner, who sends the mail. group: of the store, by name or number."""

    uid: int
    gids: frozenset[int]
    group: str


def _service(app: App) -> _Service:
    """Root's, where there is no store yet."""
    try:
        found = app.store_root.stat()
    except OSError:
        return _Service(0, frozenset(), "root")
    gids = {found.st_gid}
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(found.st_uid)
        gids = set(os.getgrouplist(account.pw_name, account.pw_gid))
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return _Service(found.st_uid, frozenset(gids), group)


def _check_hardlinks(name: str) -> Iterator[Check]:
    """Linux since 3.6; unknown where the setting cannot be read."""
    with contextlib.suppress(OSError):
        if HARDLINKS.read_text(encoding="ascii").strip() == "0":
            said = "fs.protected_hardlinks is 0: users can disable each other's choices with hard links"
            yield Check(name, "warn", said, "as root: sysctl -w fs.protected_hardlinks=1, and keep it in /etc/sysctl.d")


def _check_squatters(folder: Path, name: str) -> Iterator[Check]:
    """Owners of files under another's name; only root can list the folder."""
    try:
        entries = list(folder.iterdir())
    except PermissionError:
        yield Check(name, "ok", f"{folder} has the right owner and mode")
        return
    squatted, used, folders = list[str](), Counter[int](), Counter[int]()
    for path in entries:
        uid = path.name.partition(".")[0]
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        used[found.st_uid] += found.st_blocks * 512
        folders[found.st_uid] += stat.S_ISDIR(found.st_mode)
        is_taken = path.name == LAST_READ and not is_from_service(found, folder.stat())
        if is_taken or (uid.isdecimal() and found.st_uid not in (int(uid), 0)):
            squatted.append(f"{printable(path.name, 40)} of uid {found.st_uid}")
    yield from _check_space(folder, name, used, folders)
    if squatted:
        said = f"files under other users' names: {first_few(squatted)}"
        yield Check(name, "warn", said, f"ask their owner, then remove them from {folder}; they have no effect")
    else:
        yield Check(name, "ok", f"{folder} holds {format_count(len(entries))} files")


def _check_space(folder: Path, name: str, used: Counter[int], folders: Counter[int]) -> Iterator[Check]:
    """Everybody may make files there, of any size. used: bytes by uid; folders: how many, of unknown content."""
    for uid, size in used.most_common(_SHOWN):
        if size > MOST_BYTES or folders[uid]:
            said = f"uid {uid} keeps {size / 2**20:.1f} MiB and {format_count(folders[uid])} folders in {folder}"
            todo = "ask their owner, then remove them: a choice needs 4 KiB; a disk quota prevents this"
            yield Check(name, "warn", said, todo)


def _check_comments(app: App) -> Iterator[Check]:
    """--comment=almanac:nomail works only if slurmdbd stores comments."""
    try:
        settings = slurm_settings(app.commands)
    except AlmanacError:
        return  # the check of Slurm reports it
    if "AccountingStoreFlags" in settings and "job_comment" not in settings.words("AccountingStoreFlags"):
        todo = "add job_comment to AccountingStoreFlags in slurm.conf"
        said = "--comment=almanac:nomail has no effect: Slurm does not store comments"
        yield Check("mail of one job", "warn", said, todo)


def check_rules(app: App) -> Iterator[Check]:
    """Yield how many packaged rules the site's rules.toml changes and removes, or its fault. Without it, nothing."""
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
    """Yield the checks of the address map, the address command, and the pilot group, each only if it is configured."""
    if app.config.mail.address_map:
        yield _check_map(app)
    if app.config.mail.address_command:
        yield _check_command(app)
    if app.config.mail.users or app.config.mail.accounts:
        yield _check_pilot(app)


def _check_map(app: App) -> Check:
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
    mail = app.config.mail
    unknown = [printable(user, 40) for user in mail.users if uid_of(user) is None]
    if unknown:
        said = f"mail.users names {listed(unknown, 'user')} that this host does not know"
        return Check(PILOT, "warn", said, "correct mail.users; see `getent passwd`")
    who = f"{format_count(len(mail.users))} users and {format_count(len(mail.accounts))} accounts"
    return Check(PILOT, "ok", f"only {who} get mail (mail.users, mail.accounts)")


def check_spool(app: App) -> Iterator[Check]:
    """Check the spool of ended jobs. Without the hook it is fine: accounting gives the same, later."""
    if not app.config.mail.server or not app.store_root.exists():
        return
    spool = spool_of(app.config, app.store_root, "")
    if not spool.is_there:
        yield Check(ENDED, "ok", f"{app.config.mail.spool_dir or 'mail.spool_dir'} does not exist: {_SLOW}")
        return
    try:
        spool.trusted_owners()
        files = spool.waiting()
        bad = spool.count_bad()
    except (AlmanacError, OSError) as error:
        yield Check(ENDED, "fail", str(error), getattr(error, "hint", "") or "run doctor as root")
        return
    said = f"{spool.folder}: {format_count(len(files))} files waiting, {format_count(bad)} excluded, in {BAD}/"
    late_s = app.now_s() - min((_written_s(file, app.now_s()) for file in files), default=app.now_s())
    if late_s > LATE_SPOOL_S:
        yield Check(ENDED, "warn", f"{said}; the oldest is {format_duration(late_s)} old",
                    "run `almanac mail run` to see why")  # fmt: skip
    elif bad:
        yield Check(ENDED, "warn", said, "look at them: only SlurmUser, root, and almanac's group can write there")
    else:
        yield Check(ENDED, "ok", said)
    yield from _check_called(app)


def _written_s(file: Path, gone_s: int) -> int:
    try:
        return int(file.lstat().st_mtime)
    except OSError:
        return gone_s


def _check_called(app: App) -> Iterator[Check]:
    """Check that Slurm calls any program when a job ends; a site's own script may call ours."""
    try:
        settings = slurm_settings(app.commands)
    except AlmanacError:
        return  # the check of Slurm reports it
    if not settings.numbered("EpilogSlurmctld", "JobCompLoc"):
        todo = "on the controller, as root: almanac install-hooks ended"
        yield Check(ENDED, "warn", f"Slurm calls no program when a job ends: {_SLOW}", todo)
