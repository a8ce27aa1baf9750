"""Across jobs: the tables behind figures 1 to 11 of perlmutter-telemetry. docs/characterize.md explains each."""

from telemetry.characterize.catalogue import TABLES, characterize
from telemetry.characterize.files import write_tables
from telemetry.characterize.population import load_population, population_of
from telemetry.characterize.table import Result, StudyTable, contents

__all__ = [
    "TABLES", "Result", "StudyTable", "characterize", "contents", "load_population", "population_of",
    "write_tables",
]  # fmt: skip
