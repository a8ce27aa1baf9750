"""A small generated site, ingested and summarised once for all tests of the command line."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from one_batch import OneBatch

from almanac.config_file import load_config
from cli.demo import CONFIG
from demo import GeneratedSource, SiteShape
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.store.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "reports" / "mail"))
sys.path.insert(0, str(Path(__file__).parent))

from command_line import CommandLine


def _fill(folder: Path) -> None:
    (folder / "almanac.toml").write_text(CONFIG + "\n[advice]\nrisk = 0.05\n")
    start_s = (int(time.time()) // 86400 - 4) * 86400
    shape = dataclasses.replace(SiteShape.demo(), seed=3, days=4, start_s=start_s, users=12, jobs_per_day=150)
    source, cluster = OneBatch(GeneratedSource(shape)), Store.create(folder / "store").of("demo")
    ingest(source, cluster, start_s, shape.end_s, IngestResult("sacct", start_s, shape.end_s), lambda *_: None)
    summarize(cluster, load_config(folder / "almanac.toml"))
    CommandLine(folder)("train")


@pytest.fixture(scope="session")
def site(built_once: Callable[[str, Callable[[Path], None]], Path]) -> CommandLine:
    """Four days of a small site that ended today, with the tiers hbm40g and hbm80g, trained.

    Such a short record cannot support a risk of 1%, so the site accepts 5%.
    """
    return CommandLine(built_once("site", _fill))
