"""The site's jobs beside the Perlmutter study: the tables of `almanac characterize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from almanac.config import Config
from telemetry.characterize import Result, characterize, load_population
from telemetry.characterize.headline import note_on
from telemetry.characterize.population import jobs_within
from telemetry.store.cluster_store import ClusterStore

MOST_CHARACTERIZED = 100_000
"""The tables of the figures are made in memory, so they use an even sample of at most this many jobs."""


@dataclass(frozen=True)
class Study:
    """sampled: number of jobs behind the tables. note: on the comparison with the paper; may be empty."""

    results: Mapping[str, Result]
    sampled: int
    note: str


def load_study(store: ClusterStore, config: Config, span_s: tuple[int, int], most: int = MOST_CHARACTERIZED) -> Study:
    """The study's figures over the jobs of a span; with more jobs than `most`, over a sample. Raises StoreError."""
    population = load_population(store, *span_s, at_most=min(most, jobs_within(store.memory_limit_mib)))
    return Study(characterize(population, config), len(population), note_on(store))
