"""The data of a site report: what the jobs of a span did with the site's GPUs, what to do, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from almanac.config import Config
from reports.site.advice_use import AdviceUse, load_advice_use
from reports.site.before import Before, load_before
from reports.site.faults import SiteFaults, load_faults
from reports.site.packing import SitePacking, load_packing
from reports.site.personal_accounts import personal_accounts
from reports.site.power import NodeSetPower, load_power
from reports.site.pseudonyms import pseudonym, site_key
from reports.site.runs import site_runs
from reports.site.study import MOST_CHARACTERIZED, Study, load_study
from reports.site.totals import SiteTotals, load_totals
from telemetry.store.cluster_store import ClusterStore


@dataclass(frozen=True)
class SiteReport:
    """The content of the page, the CSV files, and the terminal.

    study: None in a report without it. shown_user, shown_account: return the name or pseudonym that the report shows.
    """

    cluster: str
    since_s: int
    until_s: int
    made_s: int
    config: Config
    totals: SiteTotals
    faults: SiteFaults
    before: Before
    advice: AdviceUse
    power: Sequence[NodeSetPower]
    packing: SitePacking
    study: Study | None
    has_names: bool
    shown_user: Callable[[str], str]
    shown_account: Callable[[str], str]


def build_site_report(
    store: ClusterStore,
    config: Config,
    span_s: tuple[int, int],
    now_s: int,
    *,
    has_names: bool = False,
    has_study: bool = True,
    most: int = MOST_CHARACTERIZED,
) -> SiteReport:
    """The report on the GPU jobs submitted in the span that have ended. Raises StoreError.

    has_study: compare with the Perlmutter study, which takes most of the time. most: with more jobs, its figures use a
    sample. Everything else always covers all jobs.
    """
    with site_runs(store, *span_s) as db:
        totals, faults = load_totals(db, config), load_faults(db)
        packing = load_packing(db, store, config, now_s)
    shown_user = str if has_names else _pseudonyms(store.root)
    return SiteReport(
        cluster=store.cluster,
        since_s=span_s[0],
        until_s=span_s[1],
        made_s=now_s,
        config=config,
        totals=totals,
        faults=faults,
        before=load_before(store, span_s, now_s, totals.total, faults),
        advice=load_advice_use(store, config, *span_s),
        power=load_power(store, config, span_s),
        packing=packing,
        study=load_study(store, config, span_s, most) if has_study else None,
        has_names=has_names,
        shown_user=shown_user,
        shown_account=str if has_names else _accounts(store, totals.parts["account"], shown_user),
    )


def _pseudonyms(store_root: Path) -> Callable[[str], str]:
    """A function that gives a user's pseudonym. It reads or makes the key at its first call; totals need none."""
    key = cache(partial(site_key, store_root))
    return lambda name: pseudonym(name, key())


def _accounts(store: ClusterStore, accounts: Iterable[str], shown_user: Callable[[str], str]) -> Callable[[str], str]:
    """A function that gives an account's shown name. Its first call reads the users, and can raise StoreError."""
    personal = cache(partial(personal_accounts, store, accounts))
    return lambda account: shown_user(personal()[account]) if account in personal() else account
