"""The site's jobs beside the Perlmutter study: the tables of its figures, and its published values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from almanac.config import Config
from telemetry.characterize import Result, characterize, load_population
from telemetry.characterize.headline import FINDINGS, Compared, compare, note_on
from telemetry.characterize.population import jobs_within
from telemetry.characterize.published import FURTHER
from telemetry.store.cluster_store import ClusterStore

MOST_CHARACTERIZED = 100_000
"""The tables of the figures are made in memory, so they use an even sample of at most this many jobs."""


@dataclass(frozen=True)
class Study:
    """sampled: number of jobs behind the tables of the figures. note: on the whole comparison; may be empty.

    compared: the site's and the published values, by figure ("1" to "11", "section VI").
    """

    results: Mapping[str, Result]
    sampled: int
    headline: tuple[Compared, ...]
    note: str
    compared: Mapping[str, tuple[Compared, ...]]


def load_study(store: ClusterStore, config: Config, span_s: tuple[int, int], most: int = MOST_CHARACTERIZED) -> Study:
    """The study's figures over the jobs of a span; with more jobs than `most`, over a sample. Raises StoreError."""
    population = load_population(store, *span_s, at_most=min(most, jobs_within(store.memory_limit_mib)))
    results = characterize(population, config)
    return Study(
        results=results,
        sampled=len(population),
        headline=tuple(compare(results, config, FINDINGS)),
        note=note_on(store),
        compared=_by_figure(results, config),
    )


def _by_figure(results: Mapping[str, Result], config: Config) -> dict[str, tuple[Compared, ...]]:
    found: dict[str, tuple[Compared, ...]] = {}
    for each in compare(results, config, (*FINDINGS, *FURTHER)):
        figure = results[each.finding.table].table.figure
        found[figure] = (*found.get(figure, ()), each)
    return found
