"""The data of a site report: the figures of a span, the span before, advice followed, the study, and shown names.

Names of users, and of accounts that have a user's name, are pseudonyms: the same in every report of a site, and
different at every site."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import pyarrow as pa

from advisor.health.record import SiteHealth, site_health
from almanac.atomic import TEMPORARY, hand_over, make_inner_folder
from almanac.config import Config
from almanac.errors import StoreError
from almanac.files import read_plain
from almanac.units import DAY_S
from reports.advice_outcomes import ANOTHER_TIER, FOLLOWED, load_told
from reports.job.host_faults import HostFault, load_host_faults
from reports.site.faults import FAILED_AGAIN, ItemKey, SiteFaults, load_fault_hours, load_faults
from reports.site.packing import SitePacking, load_packing
from reports.site.power import NodeSetPower, load_power
from reports.site.totals import Share, SiteTotals, load_total, load_totals, site_runs
from telemetry.characterize.site_use import SiteUse, site_use
from telemetry.characterize.study import characterize, jobs_within, load_population, note_on
from telemetry.characterize.table import Result
from telemetry.site import Site
from telemetry.store.partitions import partition_start
from telemetry.store.store import JOBS_FROM, ClusterStore

_SQL = """
SELECT DISTINCT a.account, j."user" FROM (SELECT unnest($accounts) AS account) a
JOIN jobs j ON lower(j."user") = lower(a.account)
"""


def personal_accounts(store: ClusterStore, accounts: Iterable[str]) -> dict[str, str]:
    """The user with an account's name, by account. Case does not count: Slurm keeps accounts in lower case.

    Covers every user with a job in the store, at any time and on any cluster. Raises StoreError.
    """
    wanted = [account for account in accounts if account]
    rows = {row for each in store.every_cluster() for row in _matches(each, wanted)}
    found = dict(sorted(rows, reverse=True))
    return found | {account: account for account, user in rows if account == user}


def _matches(store: ClusterStore, accounts: list[str]) -> list[tuple[str, str]]:
    with store.connect() as db:
        store.view(db, "jobs", ("user",))
        return db.execute(_SQL, {"accounts": accounts}).fetchall()


KEY_BYTES = 32


def site_key(store_root: Path) -> bytes:
    """The site's secret key, made at its first use. Without a key, anyone could find a name by trying all users.

    The file is `reports/pseudonyms.key` in the store. Everyone with access to the store can read it. Raises StoreError.
    """
    path = store_root / "reports" / "pseudonyms.key"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        _make(path)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}",
            "run `almanac site-report` once as the store's owner, or show names with --names",
        ) from error
    return _read(path)


def _make(path: Path) -> None:
    """Write a new key. If two processes do so at once, the first key stays."""
    make_inner_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fchmod(file.fileno(), 0o640)
            hand_over(file.fileno(), path.parent)
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """Raises FileNotFoundError, StoreError."""
    try:
        key = bytes.fromhex(read_plain(path, 1000, os.O_NOFOLLOW).decode("ascii"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", "ask an operator, or show names with --names") from error
    if len(key) < KEY_BYTES:
        raise StoreError(f"{path}: holds {len(key)} bytes, expected {KEY_BYTES}", "remove it: pseudonyms then change")
    return key


def pseudonym(name: str, key: bytes) -> str:
    """A user's pseudonym, such as "user-3f9a2c41". It depends on the name and the key only."""
    return f"user-{hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:8]}"


MORE_MEMORY, LESS_MEMORY = "asked for more memory", "asked for less memory"
_SUMS = """
SELECT outcome, asked_tier, told_tier, count(*), coalesce(sum(gpus * ran_s / 3600.0), 0)
FROM told WHERE outcome IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True)
class AdviceOutcome:
    """Jobs that were advised a tier. hours: their GPU-hours, of ended jobs."""

    name: str
    jobs: int
    hours: float


@dataclass(frozen=True)
class AdviceUse:
    """Use of the advice on tiers. outcomes: most jobs first; none if no job was advised a tier.

    smaller_hours: GPU-hours of jobs that followed advice to use a tier below the largest.
    """

    outcomes: tuple[AdviceOutcome, ...] = ()
    smaller_hours: float = 0.0

    @property
    def jobs(self) -> int:
        return sum(each.jobs for each in self.outcomes)

    def of(self, name: str) -> AdviceOutcome:
        return next((each for each in self.outcomes if each.name == name), AdviceOutcome(name, 0, 0.0))


def load_advice_use(site: Site, since_s: int, until_s: int) -> AdviceUse:
    """Count GPU jobs submitted in [since_s, until_s) as metric almanac_advice_jobs does. Raises StoreError."""
    if not site.store.files("advice", until_s=until_s):
        return AdviceUse()
    with site.store.connect() as db:
        load_told(db, site.store, since_s, until_s)
        rows = db.execute(_SUMS).fetchall()
    capacity = {tier.name: tier.capacity_mib for tier in site.config.tiers}
    largest_mib = max(capacity.values(), default=0)
    jobs: dict[str, int] = {}
    hours: dict[str, float] = {}
    smaller_hours = 0.0
    for outcome, asked, told, number, amount in rows:
        name = _named(outcome, asked, told, capacity)
        jobs[name] = jobs.get(name, 0) + number
        hours[name] = hours.get(name, 0.0) + amount
        if name == FOLLOWED and capacity.get(told, largest_mib) < largest_mib:
            smaller_hours += amount
    found = sorted(jobs, key=lambda name: (-jobs[name], name))
    return AdviceUse(tuple(AdviceOutcome(name, jobs[name], hours[name]) for name in found), smaller_hours)


def _named(outcome: str, asked: str | None, told: str, capacity: Mapping[str, int]) -> str:
    """The outcome, and for another tier whether it has more or less memory; tiers can leave the configuration."""
    asked_mib, told_mib = capacity.get(asked or ""), capacity.get(told)
    if outcome != ANOTHER_TIER or asked_mib is None or told_mib is None or asked_mib == told_mib:
        return outcome
    return MORE_MEMORY if asked_mib > told_mib else LESS_MEMORY


MAX_COVERAGE_GAP = 0.1
"""Measured shares of GPU-hours that differ by more are not compared: the change would be one of the measurement."""


@dataclass(frozen=True)
class Before:
    """The span before. why_none: why nothing is compared; then the rest is empty.

    why_no_use: why only accounting is compared: GPU-hours, and failed runs. faults, items: GPU-hours; no entry: 0.
    """

    since_s: int
    until_s: int
    why_none: str = ""
    why_no_use: str = ""
    total: Share | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[ItemKey, float] = field(default_factory=dict)

    @property
    def used(self) -> Share | None:
        """The totals, if use can be compared."""
        return None if self.why_no_use else self.total

    def knows(self, fault: str) -> bool:
        return self.total is not None and (not self.why_no_use or fault == FAILED_AGAIN)


def load_before(store: ClusterStore, span_s: tuple[int, int], now_s: int, total: Share, faults: SiteFaults) -> Before:
    """The span before, with the items of `faults`. Raises StoreError.

    Its jobs count if they had ended as long after it as has now passed since span_s: else it would have more long jobs.
    """
    since_s, until_s = span_s
    before_s = since_s - (until_s - since_s), since_s
    why_none = _why_none(store, before_s[0], min(until_s, now_s)) if total.jobs else "this span has no jobs"
    if why_none:
        return Before(*before_s, why_none=why_none)
    with site_runs(store, *before_s, ended_by_s=since_s + max(now_s - until_s, 0), has_gpu_rows=False) as db:
        earlier = load_total(db)
        by_fault, by_item = load_fault_hours(db, (item.user for item in faults.items))
    if not earlier.jobs:
        return Before(*before_s, why_none="no GPU job was submitted and ended in it")
    return Before(*before_s, "", _why_no_use(earlier, total), earlier, by_fault, by_item)


def _why_none(store: ClusterStore, since_s: int, until_s: int) -> str:
    """The reason why the store cannot know all jobs of both spans; "" if it can. Files hold a day each."""
    files = store.files("jobs")
    first_s = max(partition_start(files[0]), store.watermark(JOBS_FROM) or 0) if files else until_s
    mark_s = store.watermark("sacct")
    if first_s > since_s + DAY_S:
        return f"the store has jobs from {_date(first_s)} on"
    if mark_s is not None and mark_s < until_s - DAY_S:
        return f"accounting was read up to {_date(mark_s)} only"
    return ""


def _why_no_use(before: Share, now: Share) -> str:
    shares = [each.measured_hours / each.hours if each.hours else 0.0 for each in (before, now)]
    if abs(shares[1] - shares[0]) <= MAX_COVERAGE_GAP:
        return ""
    return f"{100 * shares[0]:.0f}% of its GPU-hours were measured, and now {100 * shares[1]:.0f}% are"


def _date(time_s: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_s, dt.UTC):%Y-%m-%d}"


MOST_CHARACTERIZED = 100_000
"""The tables of the figures are made in memory, so they use an even sample of at most this many jobs."""


@dataclass(frozen=True)
class Study:
    """The study's tables. sampled: number of jobs behind them. note: on the comparison with the paper; may be empty."""

    results: Mapping[str, Result]
    sampled: int
    note: str


def load_study(site: Site, span_s: tuple[int, int], most: int = MOST_CHARACTERIZED) -> Study:
    """The study's figures over the jobs of a span; with more jobs than `most`, over a sample. Raises StoreError."""
    store = site.store
    population = load_population(store, *span_s, at_most=min(most, jobs_within(store.memory_limit_mib)))
    return Study(characterize(population, site.config), len(population), note_on(store))


@dataclass(frozen=True)
class SiteReport:
    """The content of the page, the CSV files, and the terminal.

    use, study: None in a report without them. shown_user, shown_account: return the name or pseudonym that the report
    shows.
    """

    cluster: str
    since_s: int
    until_s: int
    made_s: int
    config: Config
    totals: SiteTotals
    faults: SiteFaults
    host_faults: Sequence[HostFault]
    before: Before
    advice: AdviceUse
    power: Sequence[NodeSetPower]
    packing: SitePacking
    health: SiteHealth
    use: SiteUse | None
    study: Study | None
    has_names: bool
    shown_user: Callable[[str], str]
    shown_account: Callable[[str], str]


def build_site_report(
    site: Site,
    span_s: tuple[int, int],
    *,
    has_names: bool = False,
    has_study: bool = True,
    most: int = MOST_CHARACTERIZED,
) -> SiteReport:
    """The report on the GPU jobs submitted in the span that have ended. Raises StoreError.

    has_study: characterize use, and compare with the Perlmutter study, which takes most of the time. most: with more
    jobs, the study's figures use a sample. Everything else always covers all jobs.
    """
    store, config, now_s = site.store, site.config, site.now_s()
    with site_runs(store, *span_s) as db:
        totals, faults = load_totals(db, config), load_faults(db)
        packing = load_packing(db, site)
    shown_user = str if has_names else pseudonyms(store.root)
    return SiteReport(
        cluster=store.cluster,
        since_s=span_s[0],
        until_s=span_s[1],
        made_s=now_s,
        config=config,
        totals=totals,
        faults=faults,
        host_faults=load_host_faults(store, config, span_s, (span_s[0], now_s + 1)),
        before=load_before(store, span_s, now_s, totals.total, faults),
        advice=load_advice_use(site, *span_s),
        power=load_power(site, span_s),
        packing=packing,
        health=site_health(store, min(span_s[1], now_s + 1), max(1, (span_s[1] - span_s[0]) // DAY_S)),
        use=shown_use(site_use(store, span_s, config.node_sets, config.site.zone), shown_user) if has_study else None,
        study=load_study(site, span_s, most) if has_study else None,
        has_names=has_names,
        shown_user=shown_user,
        shown_account=str if has_names else _accounts(store, totals.parts["account"], shown_user),
    )


def shown_use(use: SiteUse, shown_user: Callable[[str], str]) -> SiteUse:
    """Return the use of the site with the users' shown names."""
    rows = use.tables["marquee_users"]
    names = pa.array([shown_user(str(name)) for name in rows["user"].to_pylist()], pa.string())
    return replace(use, tables={**use.tables, "marquee_users": rows.set_column(0, "user", names)})


def pseudonyms(store_root: Path) -> Callable[[str], str]:
    """A function that gives a user's pseudonym. It reads or makes the key at its first call; totals need none."""
    key = cache(partial(site_key, store_root))
    return lambda name: pseudonym(name, key())


def _accounts(store: ClusterStore, accounts: Iterable[str], shown_user: Callable[[str], str]) -> Callable[[str], str]:
    """A function that gives an account's shown name. Its first call reads the users, and can raise StoreError."""
    personal = cache(partial(personal_accounts, store, accounts))
    return lambda account: shown_user(personal()[account]) if account in personal() else account
