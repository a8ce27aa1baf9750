"""`almanac summarize --engine`: which workers, and what is said where they cannot be had."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from distributed import LocalCluster

from almanac.errors import ConfigError
from cli.app import App
from cli.summarize import open_engine
from telemetry.metrics.partials import map_partials

if TYPE_CHECKING:
    from command_line import CommandLine


NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def app(tmp_path: Path) -> App:
    (tmp_path / "almanac.toml").write_text("")
    return App(config_path=str(tmp_path / "almanac.toml"), store_path=str(tmp_path / "store"))


def test_the_local_engine_is_this_process(app: App) -> None:
    with open_engine(app, "local") as mapper:
        assert mapper is map_partials


@pytest.mark.parametrize("engine", [NOWHERE, "slurm"])
def test_an_engine_that_is_not_used_starts_nothing_and_leaves_signals_alone(app: App, engine: str) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with open_engine(app, engine):
        for number, former in zip(numbers, before, strict=True):
            assert signal.getsignal(number) is not former
    assert [signal.getsignal(number) for number in numbers] == before
    assert not Path(app.store_root).exists()


def test_a_run_under_nohup_goes_on_without_its_terminal(app: App) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with open_engine(app, NOWHERE):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    ("engine", "missing"), [(NOWHERE, "distributed"), (NOWHERE, "cryptography"), ("slurm", "dask_jobqueue")]
)
def test_without_the_extra_the_error_says_how_to_install_it(
    app: App, engine: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("telemetry.metrics.dask_engine", "telemetry.metrics.dask_engine", "telemetry.metrics.slurm_workers"):
        package, _, name = module.rpartition(".")
        if module in sys.modules:  # what is imported anew below must not stay the package's
            monkeypatch.setattr(sys.modules[package], name, sys.modules[module])
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=f"needs {missing}") as caught:
        with open_engine(app, engine):
            raise AssertionError("opened")
    assert caught.value.hint == "pip install 'slurm-almanac[cluster]'"


@pytest.mark.parametrize("engine", ["dask", "", "evil\x1b[31m"])
def test_an_engine_is_here_in_slurm_or_at_an_address(app: App, engine: str) -> None:
    with pytest.raises(click.UsageError, match="expected local, slurm, or the address") as caught:
        with open_engine(app, engine):
            raise AssertionError("opened")
    assert "\x1b" not in str(caught.value)


def test_summarize_on_dask_stores_what_the_local_engine_does(site: CommandLine, tmp_path: Path) -> None:
    own = dataclasses.replace(site, folder=tmp_path / "site")
    shutil.copytree(site.folder, own.folder)
    before = own.json("jobs", "-a", "-n", "0", "--json")
    assert len(before) > 100
    shutil.rmtree(own.folder / "store" / "job_metrics")
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        own("summarize", "-S", "2020-01-01", "--engine", cluster.scheduler_address)
    assert own.json("jobs", "-a", "-n", "0", "--json") == before
