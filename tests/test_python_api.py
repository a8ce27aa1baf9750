"""The Python API, and the examples of its page, on a generated site."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from advisor.artefacts import save
from advisor.service import SiteRecord, train
from almanac.api import SiteReader, explain, open_site, sbatch_request
from almanac.config_file import load_config
from almanac.errors import CommandError, ConfigError, RequestError, StoreError
from cli.demo import CONFIG
from demo import GeneratedSource, SiteShape
from telemetry.history import HISTORY, load_history
from telemetry.ingest import SourceSpan, ingest_all
from telemetry.metrics.summary import summarize
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python-api.md"
START_S = 20_605 * 86_400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four days of a small site, trained. So short a record cannot support a risk of 1%: it accepts 5%."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "almanac.toml").write_text(CONFIG + "\n[advice]\nrisk = 0.05\n")
    config = load_config(folder / "almanac.toml")
    shape = dataclasses.replace(SiteShape.demo(), days=4, start_s=START_S, users=12, jobs_per_day=100)
    store = Store.create(folder / "store")
    ingest_all(store.of("demo"), [SourceSpan(GeneratedSource(shape), shape.start_s, shape.end_s)])
    summarize(store.of("demo"), config)
    record = SiteRecord(store.of("demo"), load_history(store.of("demo"), running=True), shape.end_s)
    save(train(record.history, config, record.now_s), store.of("demo").models_dir)
    return folder


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SiteReader:
    """Named by the environment, as on a site, at the end of the record."""
    monkeypatch.setenv("ALMANAC_STORE", str(folder / "store"))
    monkeypatch.setenv("ALMANAC_CONFIG", str(folder / "almanac.toml"))
    return open_site(clock=lambda: START_S + 4 * 86_400)


def examples() -> Iterator[str]:
    yield from re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_page_hold(site: SiteReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("almanac.api.open_site", lambda: site)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest("".join(examples()), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    done = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert done.attempted >= 15
    assert not done.failed, "".join(said)


def test_it_names_no_unknown_column(site: SiteReader) -> None:
    section = PAGE.read_text(encoding="utf-8").split("### `SiteReader.jobs")[1].split("###")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 20
    assert named <= set(HISTORY.names)
    assert site.jobs().columns.to_list() == HISTORY.names


def test_jobs_are_filtered_by_user_and_time(site: SiteReader) -> None:
    jobs = site.jobs(["submit_s", "user"])
    user, middle_s = jobs["user"].iloc[0], int(jobs["submit_s"].median())
    found = site.jobs(["submit_s", "user"], user=user, until_s=middle_s)
    wanted = jobs[(jobs["user"] == user) & (jobs["submit_s"] < middle_s)]
    assert len(found) == len(wanted) > 0
    assert len(site.jobs(["user"], user="nobody; DROP TABLE jobs")) == 0


def test_an_unknown_column_or_job_is_an_error(site: SiteReader) -> None:
    with pytest.raises(ValueError, match="unknown columns: energy_kwh; known: job_id"):
        site.jobs(["job_id", "energy_kwh"])
    with pytest.raises(CommandError, match="almanac has nothing about job 7, and Slurm did not answer"):
        site.report(7)


def test_a_report_is_plain_values(site: SiteReader) -> None:
    job_id = int(site.jobs(["job_id"])["job_id"].iloc[-1])
    assert json.loads(json.dumps(site.report(job_id), allow_nan=False))["job_id"] == job_id


def test_a_stranger_gets_no_tier(site: SiteReader) -> None:
    advice = site.advise(sbatch_request(["-J", "first", "-G2"], user="stranger"))
    assert advice.tier.tier is None and advice.bound is None
    assert "first" in explain(advice)


def test_a_script_is_read_and_an_unreadable_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\n#SBATCH -G3 -J \xff\n")
    assert sbatch_request([str(tmp_path / "run.sh")], user="ann").gpu_count == 3
    with pytest.raises(RequestError, match="No such file"):
        sbatch_request([str(tmp_path / "none.sh")], user="ann")


def test_a_store_without_a_cluster_or_with_several(tmp_path: Path) -> None:
    (tmp_path / "almanac.toml").touch()
    config, root = tmp_path / "almanac.toml", tmp_path / "store"
    with pytest.raises(StoreError, match="no store"):
        open_site(root, config=config)
    store = Store.create(root)
    with pytest.raises(StoreError, match="holds no jobs"):
        open_site(root, config=config)
    for cluster in ("a", "b"):
        row = {"job_id": 1, "submit_s": 5, "start_s": 5, "end_s": 9, "user": cluster, "gpu_count": 1}
        store.of(cluster).write("jobs", pa.Table.from_pylist([row], schema=JOBS))
    with pytest.raises(ConfigError, match="several clusters: a, b"):
        open_site(root, config=config)
    assert open_site(root, "b", config=config).jobs(["user"])["user"].to_list() == ["b"]


def test_the_import_loads_nothing_else() -> None:
    code = "import sys, almanac; almanac.open_site; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    tops = {name.split(".")[0] for name in done.stdout.splitlines()}
    assert not tops & {"pandas", "numpy", "pyarrow", "duckdb", "advisor", "reports", "click"}
