"""A small generated site, ingested and summarised once for all tests of the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from almanac.config_file import load_config
from cli.demo import CONFIG
from demo import GeneratedSource, SiteShape
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.store.store import Store

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "reports" / "mail")]


@dataclass(frozen=True)
class CommandLine:
    """Runs `almanac` as a person would, in a process of its own."""

    folder: Path

    def __call__(self, *argv: str, ok: tuple[int, ...] = (0,), stdin: str | None = None, **env: str) -> str:
        options = ["--config", str(self.folder / "almanac.toml"), "--store", str(self.folder / "store")]
        done = self.raw(*options, *argv, stdin=stdin, **env)
        assert done.returncode in ok, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def raw(self, *argv: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        whole = {**os.environ, "NO_COLOR": "1", **env}
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *argv],
            env=whole,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def json(self, *argv: str, ok: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self(*argv, ok=ok))


def _fill(folder: Path) -> None:
    (folder / "almanac.toml").write_text(CONFIG + "\n[advice]\nrisk = 0.05\n")
    start_s = (int(time.time()) // 86400 - 4) * 86400
    shape = dataclasses.replace(SiteShape.demo(), seed=3, days=4, start_s=start_s, users=12, jobs_per_day=150)
    store = Store.create(folder / "store")
    result = IngestResult("generated", shape.start_s, shape.end_s)
    ingest(GeneratedSource(shape), store.of("demo"), shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    summarize(store.of("demo"), load_config(folder / "almanac.toml"))
    CommandLine(folder)("train")


@pytest.fixture(scope="session")
def site(built_once: Callable[[str, Callable[[Path], None]], Path]) -> CommandLine:
    """Four days of a small site that ended today, with the tiers hbm40g and hbm80g, trained.

    Such a short record cannot support a risk of 1%, so the site accepts 5%.
    """
    return CommandLine(built_once("site", _fill))
