"""`almanac doctor` on mail: the server, the addresses, the outbox, and the folder of the users' preferences."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from almanac.errors import AlmanacError, NotAllowedError
from almanac.units import format_count, format_duration, printable
from cli.app import App
from cli.doctor.findings import Check
from cli.doctor.mail_settings import check_mail_settings

NAME = "mail"
LATE_S = 3600
_SHOWN = 5
MOST_BYTES = 1 << 20
"""Doctor warns about users who use more disk space than this. A choice takes 4 KiB."""
HARDLINKS = Path("/proc/sys/fs/protected_hardlinks")


def check_mail(app: App) -> Iterator[Check]:
    """It is fine if no server is configured: then no mail is sent."""
    if not app.config.mail.server:
        yield Check(NAME, "ok", "mail.server is not set: no mail is sent")
        return
    yield from _check_server(app)
    yield from _check_password(app)
    yield from check_mail_settings(app)
    yield from _check_outbox(app)
    yield from _check_preferences(app)
    yield from _check_comments(app)


def _check_server(app: App) -> Iterator[Check]:
    from smtplib import SMTPException

    from reports.mail.delivery import connect_smtp, hang_up, reply_of, secrets_of
    from reports.mail.message import sender_of

    config = app.config.mail
    where = f"{config.server}:{config.port}"
    try:
        sender = sender_of(config)
        hang_up(connect_smtp(config), config)
        yield Check(NAME, "ok", f"{where} answers ({config.security}); mail is sent from {sender}")
    except AlmanacError as error:
        yield Check(NAME, "fail", str(error), error.hint)
    except (OSError, SMTPException, ValueError) as error:  # ValueError: a host name or password that cannot be sent
        said = f"{where} does not accept mail: {reply_of(error, secrets_of(config))[1]}"
        yield Check(NAME, "fail", said, "correct server, port, security, ca_file, or login under [mail]")


def _check_password(app: App) -> Iterator[Check]:
    path = Path(app.config.mail.password_file)
    if app.config.mail.username and path.is_file() and path.stat().st_mode & 0o007:
        yield Check(NAME, "fail", f"{path} is readable by everybody", f"chmod 640 {path}")


def _check_outbox(app: App) -> Iterator[Check]:
    from reports.mail.outbox import outbox_path, read_counts

    try:
        counts = read_counts(outbox_path(app.store_root))
    except NotAllowedError as error:
        yield Check("outbox", "warn", str(error), error.hint)
        return
    if counts is None:
        yield Check("outbox", "warn", "nothing was ever sent", "run `almanac report --due` on a timer")
        return
    late_s = 0 if counts.oldest_put_s is None else app.now_s() - counts.oldest_put_s
    said = (
        f"{format_count(sum(counts.sent.values()))} mails sent, {format_count(counts.queued)} queued, "
        f"{format_count(counts.given_up)} given up; {format_count(counts.waiting)} jobs not decided yet"
    )
    details = {"sent": dict(counts.sent), "queued": counts.queued, "given_up": counts.given_up,
               "failed_tries": counts.failed_tries, "waiting": counts.waiting}  # fmt: skip
    if late_s > LATE_S:
        said = f"{said}; the oldest mail has waited {format_duration(late_s)}"
        yield Check("outbox", "warn", said, "run `almanac report --due` to see what the server answers", details)
    else:
        yield Check("outbox", "ok", said, "", details)


def _check_preferences(app: App) -> Iterator[Check]:
    from reports.mail.preferences import FOLDER_MODE, READABLE_FOLDER_MODE, folder_of

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
    """Who owns a file under another's name; only root can list the folder."""
    from reports.mail.last_read import NAME as LAST_READ
    from reports.mail.last_read import is_from_service

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
        more = f" and {len(squatted) - _SHOWN} more" if len(squatted) > _SHOWN else ""
        said = f"files under other users' names: {', '.join(squatted[:_SHOWN])}{more}"
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
    from telemetry.slurm.commands import controller_config

    try:
        flags = re.search(r"^AccountingStoreFlags\s*=(.*)$", controller_config(app.commands), re.MULTILINE)
    except AlmanacError:
        return  # the check of Slurm reports it
    if flags and "job_comment" not in flags[1].lower():
        todo = "add job_comment to AccountingStoreFlags in slurm.conf"
        said = "--comment=almanac:nomail has no effect: Slurm does not store comments"
        yield Check("mail of one job", "warn", said, todo)
