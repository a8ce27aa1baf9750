"""`almanac publish`: computes an advice file for each user from the store, and `_site` for everybody else.

A user's file is computed again after their history, the models, the settings or the program change, and once half of
its lifetime is over. It is written if the content changes, or if half of its lifetime is over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

import pyarrow as pa

from advisor.from_store import load_usable
from advisor.health.checkpoints import FailureRate, advise_checkpoints, checkpoint_text
from advisor.health.record import site_rate
from advisor.priority import require_ageing
from advisor.service import Trained
from almanac import __version__
from almanac.config import Config, Priority
from almanac.errors import AlmanacError, ConfigError, FileFormatError
from almanac.published.files import is_of_future
from almanac.published.outgoing import Outgoing, Uids, outgoing_of, owners_of, uid_of
from almanac.submit_config import SITE, PriorityMode
from almanac.units import DAY_S, format_count
from slurm.commands import Runner, slurm_settings
from slurm.nodes import tiers_now
from slurm_hooks.advice.file import ADVICE, FAMILY, LIFETIME_S, AdviceFile, AdviceRow, unwritable
from slurm_hooks.advice.kinds import PACKING, TIMES, PackingFile, PackingRow
from slurm_hooks.advice.publication_log import EVERYBODY, PublishedChange, changed_rows, record
from slurm_hooks.advice.rows import SITE_JOBS, UserRows, rows_by_user, site_rows
from slurm_hooks.advice.sched import FORMAT, LINES, MAX_BYTES, render, row_line
from telemetry.history import UserHistories
from telemetry.site import Site

SPARE_BYTES = 64
"""Bytes of a file's size that are left for numbers that grow."""


@dataclass
class Published:
    """Outcome of a run, or of a dry run what it would do. Names of users are as accounting has them.

    written: files whose content changed, renewed: only their lifetime; unchanged: left as they were. cut: families
    that did not fit. no_uid: names that the system does not know; shared_uid: several names of one uid, refused.
    families: in the files of all users that this run computed.
    """

    mode: PriorityMode
    written: int = 0
    renewed: int = 0
    unchanged: int = 0
    removed: int = 0
    families: int = 0
    cut: int = 0
    no_uid: list[str] = field(default_factory=list)
    shared_uid: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PublishRun:
    """One run. site: at its time. mode: the `mode` of the files, for job_submit. is_dry: nothing is written."""

    site: Site
    folder: Outgoing
    trained: Trained | None
    mode: PriorityMode
    is_dry: bool = False
    processes: int = 1

    @property
    def lifetime_s(self) -> int:
        return LIFETIME_S

    @cached_property
    def failure_rate(self) -> FailureRate:
        return site_rate(self.site.store, self.site.now_s())

    def with_checkpoint(self, row: AdviceRow) -> AdviceRow:
        """The row of a family, with a sentence for jobs that seldom end without a failure of a node."""
        if row.kind != FAMILY:
            return row
        cost_s = self.site.config.advice.checkpoint_s
        advice = advise_checkpoints(self.failure_rate, row.gpus or 0, row.predicted_s, cost_s)
        return dataclasses.replace(row, checkpoint=checkpoint_text(advice)) if advice else row


@dataclass(frozen=True)
class FileInputs:
    """A file's name (uid), the user whose it is, and what it is made from."""

    name: str
    user: str
    digest: str


def publish(job: PublishRun, uids: Uids = uid_of) -> Published:
    """Update the published advice files, and return what was done; a dry run returns what it would do.

    Raises ConfigError, BusyError, and StoreError, such as for a full disk: the old files are then still there.
    """
    strange = unwritable(job.site.config.tiers)
    if strange:
        raise ConfigError(
            f"tiers cannot be named {', '.join(map(repr, strange))} in advice files",
            'use ASCII without blanks, ";", "="',
        )
    outcome = Published(job.mode)
    if job.is_dry:
        _publish(job, uids, outcome)
        return outcome
    with job.folder.locked():
        job.folder.prepare()
        _publish(job, uids, outcome)
    return outcome


def _publish(job: PublishRun, uids: Uids, outcome: Published) -> None:
    since_s = job.site.now_s() - job.site.config.advice.history_days * DAY_S
    histories = UserHistories(job.site.store)
    plan = _Plan()
    try:
        digests = histories.digests(since_s)
        known = _known(job, _resolve(digests, uids, outcome), digests)
        stale = {each.user: each for each in known if not _is_fresh(job, each)}
        outcome.unchanged += len(known) - len(stale)
        for rows in rows_by_user(histories, list(stale), job.trained, job.site.config, job.site.now_s(), job.processes):
            _plan(job, plan, [(stale[user], rows[user]) for user in rows], outcome)
        newest = histories.newest(SITE_JOBS, since_s)
    finally:
        histories.close()
    of_site = UserRows(site_rows(newest, job.trained, job.site.config, job.site.now_s()))
    everybody = FileInputs(SITE, EVERYBODY, _digest(_settings(job)))
    _plan(job, plan, [(everybody, of_site)], outcome)
    silent = {each.name for each in stale.values()} - plan.names
    plan.gone = _gone(job, {each.name for each in known} - silent, outcome)
    plan.tables.append(changed_rows(_removals(job, plan.gone), job.site.now_s()))
    _apply(job, plan, outcome)


@dataclass
class _Plan:
    """names: files that have rows. files: uid, name, and content of those to be written.

    packing: by uid the rows of the packing file, of all users that this run computed.
    """

    names: set[str] = field(default_factory=set)
    files: list[tuple[str, str, bytes]] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    packing: dict[str, list[PackingRow]] = field(default_factory=dict)


def _plan(job: PublishRun, plan: _Plan, rows: Iterable[tuple[FileInputs, UserRows]], outcome: Published) -> None:
    changes = []
    for known, own in rows:
        plan.names.add(known.name)
        if known.name != SITE:
            plan.packing[known.name] = own.packing
        before = _before(job, known.name)
        outcome.cut += own.cut
        after = _after(job, known, [job.with_checkpoint(row) for row in own.rows], before, outcome)
        if after is not None:
            plan.files += [(known.name, LINES, render(after)), (known.name, ADVICE.name, ADVICE.render(after))]
            changes.append(PublishedChange(known.user, before, after))
    plan.tables.append(changed_rows(changes, job.site.now_s()))


def _resolve(users: Iterable[str], uids: Uids, outcome: Published) -> dict[str, int]:
    """uid by user; those without one, and several of one uid, are left out and named."""
    owners = owners_of(users, uids)
    outcome.no_uid, outcome.shared_uid = owners.unknown, owners.shared
    return owners.uids


def _known(job: PublishRun, uids: Mapping[str, int], digests: Mapping[str, str]) -> list[FileInputs]:
    settings = _settings(job)
    return [FileInputs(str(uid), user, _digest(f"{settings} {user} {digests[user]}")) for user, uid in uids.items()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def _settings(job: PublishRun) -> str:
    """Text that changes with everything that rows are made from, except the user's own history."""
    trained, config = job.trained, job.site.config
    model = (trained.trained_s, trained.model is None, trained.jobs) if trained else None
    sections = (config.advice, config.priority, config.tiers, config.hooks, config.packing, job.mode)
    return repr((FORMAT, __version__, model, sections))


def _before(job: PublishRun, name: str) -> AdviceFile | None:
    """The file that is there, expired or not; None if it is absent, malformed, or of the future."""
    try:
        file = ADVICE.parse(job.folder.read(name, ADVICE.name) or b"").value
    except FileFormatError:
        return None
    return None if is_of_future(file, job.site.now_s()) else file


def _is_fresh(job: PublishRun, known: FileInputs) -> bool:
    """Return True if nothing has changed that the file is made from."""
    before = _before(job, known.name)
    return before is not None and before.version.endswith(f"-{known.digest}") and not _is_half_over(job, before)


def _is_half_over(job: PublishRun, file: AdviceFile) -> bool:
    return file.expires_s - job.site.now_s() <= job.lifetime_s / 2


def _after(
    job: PublishRun,
    known: FileInputs,
    rows: Sequence[AdviceRow],
    before: AdviceFile | None,
    outcome: Published,
) -> AdviceFile | None:
    """The file to write; None if the file says the same and is less than half over."""
    file = _fitting(job, known, rows)
    outcome.families += sum(row.kind == FAMILY for row in file.rows)
    outcome.cut += len(rows) - len(file.rows)
    if before is None or _said(before) != _said(file):
        outcome.written += 1
        return file
    if not _is_half_over(job, before):
        outcome.unchanged += 1
        return None
    outcome.renewed += 1
    since = before.version.partition("-")[0]
    return dataclasses.replace(file, version=f"{since}-{known.digest}")


def _said(file: AdviceFile) -> AdviceFile:
    return dataclasses.replace(file, version="", written_s=0, expires_s=0)


def _fitting(job: PublishRun, known: FileInputs, rows: Sequence[AdviceRow]) -> AdviceFile:
    """The file of these rows; of families, which come newest first, as many as fit: reasons give way to rows."""
    empty = _file(job, known, [])
    rest = [row for row in rows if row.kind != FAMILY]
    left = MAX_BYTES - SPARE_BYTES - len(render(empty)) - sum(map(_size, rest))
    if sum(map(_size, rows)) - sum(map(_size, rest)) > left:
        rows = [dataclasses.replace(row, why_not="") for row in rows]
    families = []
    for row in rows:
        if row.kind == FAMILY:
            left -= _size(row)
            if left < 0:
                break
            families.append(row)
    return dataclasses.replace(empty, rows=(*families, *rest))


def _size(row: AdviceRow) -> int:
    return len(row_line(row)) + 1


def _file(job: PublishRun, known: FileInputs, rows: Sequence[AdviceRow]) -> AdviceFile:
    hooks, config = job.site.config.hooks, job.site.config
    return AdviceFile(
        version=f"{datetime.fromtimestamp(job.site.now_s(), UTC):%Y%m%dT%H%M%SZ}-{known.digest}",
        written_s=job.site.now_s(),
        expires_s=job.site.now_s() + job.lifetime_s,
        mode=job.mode,
        tell=hooks.tell,
        prompt=hooks.prompt,
        # As they are read back, so that a file compares equal to what it was made from.
        priority=Priority(
            points_per_e=config.priority.points_per_e,
            min_gpu_time_s=config.priority.min_gpu_time_s,
            max_gpu_time_s=config.priority.max_gpu_time_s,
        ),
        tiers=tuple(dataclasses.replace(tier, gpu_model="") for tier in config.tiers),
        rows=tuple(rows),
    )


def _gone(job: PublishRun, kept: set[str], outcome: Published) -> list[str]:
    """Files of users who are no more, or of whom there is nothing to say any more.

    While a name of the record has no uid only expired ones: a user database may be out of reach, in part or as a whole.
    """
    known = (name for name in job.folder.users() if name not in kept and name.isdecimal())
    gone = [name for name in known if job.folder.path(name, LINES).exists()]
    if not outcome.no_uid:
        return gone
    expired = [name for name in gone if _is_expired(job, name)]
    if len(expired) < len(gone):
        many = format_count(len(gone) - len(expired))
        outcome.warnings.append(f"{many} files of nobody known are kept until they expire: some users have no uid here")
    return expired


def _is_expired(job: PublishRun, name: str) -> bool:
    """Also where the file is malformed: it is not used."""
    before = _before(job, name)
    return before is None or before.expires_s <= job.site.now_s()


def _apply(job: PublishRun, plan: _Plan, outcome: Published) -> None:
    """First what is published is recorded, then it is: a file that hooks have read is never unknown."""
    outcome.removed = len(plan.gone)
    outcome.changed = [*(uid for uid, name, _ in plan.files if name == LINES), *plan.gone]
    if job.is_dry:
        return
    record(job.site.store, pa.concat_tables(plan.tables))
    now_s = job.site.now_s()
    packing = {
        uid: PackingFile(now_s, now_s + job.lifetime_s, PACKING.fitting(rows)) for uid, rows in plan.packing.items()
    }
    files = [*plan.files, *((uid, PACKING.name, PACKING.render(file)) for uid, file in packing.items() if file.rows)]
    if files:
        job.folder.write(files)
    for uid, file in packing.items():
        if not file.rows:
            job.folder.remove(uid, [PACKING.name])
    for uid in plan.gone:
        job.folder.remove(uid, [LINES, ADVICE.name, PACKING.name, TIMES.name])


def _removals(job: PublishRun, names: Sequence[str]) -> Iterator[PublishedChange]:
    for name in names:
        try:
            user = pwd.getpwuid(int(name)).pw_name
            before = ADVICE.parse(job.folder.read(name, ADVICE.name) or b"").value
        except (KeyError, OverflowError, FileFormatError):
            continue  # the name is not known any more, and so nothing can be asked by it
        yield PublishedChange(user, before, None)


UNTRAINED = "nothing is trained: there is no advice for users who have run nothing (`almanac train`)"


def prepare(site: Site, is_dry: bool = False) -> tuple[PublishRun, list[str]]:
    """A run, and what is wrong with Slurm's weights and GPU types. Raises ConfigError, CommandError, StoreError."""
    warnings = list[str]()
    config, now_s = site.config, site.now_s()
    mode = _mode(config, site.commands, warnings)
    now = tiers_now(config.tiers, site.commands)
    if now.missing:
        warnings.append(f"not advised: {', '.join(tier.name for tier in now.missing)}: {now.why_not}")
    job = PublishRun(
        site=site.but(config=dataclasses.replace(config, tiers=now.tiers)).at(now_s),
        folder=outgoing_of(site.store.root, site.store.cluster),
        trained=load_usable(site.store.models_dir, now_s),
        mode=mode,
        is_dry=is_dry,
        processes=len(os.sched_getaffinity(0)),
    )
    return job, warnings


def publish_site(job: PublishRun) -> Published:
    """Publish the advice of every user. Warns if no model was trained. Raises what `publish` raises."""
    done = publish(job)
    if job.trained is None:
        done.warnings.append(UNTRAINED)
    return done


def _mode(config: Config, commands: Runner, warnings: list[str]) -> PriorityMode:
    """The configured mode, or observe where Slurm's weights do not fit or cannot be read."""
    mode = config.priority.mode
    if mode != "apply":
        return mode
    try:
        require_ageing(slurm_settings(commands), config.priority)
    except AlmanacError as error:
        warnings.append(f'files say mode "observe": {error}; {error.hint}')
        return "observe"
    return mode
