"""The data of a site report: what the jobs of a span did with the site's GPUs, compared with Perlmutter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from almanac.config import Config
from reports.site.personal_accounts import personal_accounts
from reports.site.power import NodeSetPower, load_power
from reports.site.pseudonyms import pseudonym, site_key
from reports.site.totals import SiteTotals, load_totals
from telemetry.characterize import Result, characterize, load_population
from telemetry.characterize.headline import FINDINGS, Compared, compare, note_on
from telemetry.characterize.population import jobs_within
from telemetry.characterize.published import FURTHER
from telemetry.store.cluster_store import ClusterStore

MOST_CHARACTERIZED = 100_000
"""The tables of the figures are made in memory, so they use an even sample of at most this many jobs."""


@dataclass(frozen=True)
class SiteReport:
    """The content of the page and the CSV files.

    sampled: number of jobs behind the tables of the figures, out of `totals.total.jobs`. compared: the site's and the
    published values, by figure ("1" to "11", "section VI"). shown_user, shown_account: return the name or pseudonym
    that the report shows.
    """

    cluster: str
    since_s: int
    until_s: int
    made_s: int
    config: Config
    totals: SiteTotals
    power: Sequence[NodeSetPower]
    results: Mapping[str, Result]
    sampled: int
    headline: tuple[Compared, ...]
    headline_note: str
    compared: Mapping[str, tuple[Compared, ...]]
    has_names: bool
    shown_user: Callable[[str], str]
    shown_account: Callable[[str], str]

    @property
    def is_sample(self) -> bool:
        return self.sampled < self.totals.total.jobs


def build_site_report(
    store: ClusterStore,
    config: Config,
    span_s: tuple[int, int],
    now_s: int,
    *,
    has_names: bool = False,
    most: int = MOST_CHARACTERIZED,
) -> SiteReport:
    """The report on the GPU jobs submitted in the span that have ended. Raises StoreError.

    most: with more jobs, the figures use a sample. Totals, unused GPU-hours, and tiers always cover all jobs.
    """
    totals = load_totals(store, config, *span_s)
    population = load_population(store, *span_s, at_most=min(most, jobs_within(store.memory_limit_mib)))
    results = characterize(population, config)
    shown_user = str if has_names else _pseudonyms(store.root)
    return SiteReport(
        cluster=store.cluster,
        since_s=span_s[0],
        until_s=span_s[1],
        made_s=now_s,
        config=config,
        totals=totals,
        power=load_power(store, config, span_s),
        results=results,
        sampled=len(population),
        headline=tuple(compare(results, config, FINDINGS)),
        headline_note=note_on(store),
        compared=_by_figure(results, config),
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


def _by_figure(results: Mapping[str, Result], config: Config) -> dict[str, tuple[Compared, ...]]:
    found: dict[str, tuple[Compared, ...]] = {}
    for each in compare(results, config, (*FINDINGS, *FURTHER)):
        figure = results[each.finding.table].table.figure
        found[figure] = (*found.get(figure, ()), each)
    return found
