"""`almanac backtest power` on the store and on a series file: tables, JSON, picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from almanac.errors import CommandError, ConfigError, FileFormatError, NotAllowedError, RequestError, StoreError
from cli.app import App
from cli.backtest_power import power
from telemetry.store.schema import JOBS
from telemetry.store.store import Store

T0 = 1_767_571_200
"""2026-01-05, a Monday."""
DAYS = 16
CONFIG = """
[site]
cluster = "lab"
[power]
boot_min = 4
[cost]
per_kwh = 0.25
currency = "EUR"
[[node_sets]]
name = "gpu"
nodes = "n[01-20]"
"""


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    minutes = np.arange(DAYS * 1440)
    frame = pd.DataFrame({
        "time": pd.Timestamp("2026-01-05") + pd.to_timedelta(minutes, "min"),
        "active": np.round(10 + 6 * np.sin(minutes * 2 * np.pi / 1440)).astype(int), "total": 20,
    })  # fmt: skip
    path = tmp_path_factory.mktemp("series") / "set.parquet"
    frame.to_parquet(path)
    return path


def jobs() -> list[dict[str, Any]]:
    """Each node runs one job a day: node n from n/2 hours after midnight on, for 10 hours; n01 at noon, too."""
    rows: list[dict[str, Any]] = []
    for day in range(DAYS):
        for node in range(1, 21):
            start = T0 + day * 86400 + node * 1800 + 17 * day
            row = {"submit_s": start - 30, "start_s": start, "end_s": start + 36000, "node_list": f"n{node:02d}"}
            rows.append({"job_id": len(rows) + 1, "node_count": 1, "cpu_count": 8, "gpu_count": 8, **row})
    return rows


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Configuration and store."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "almanac.toml").write_text(CONFIG)
    store = Store.create(folder / "store")
    store.of("lab").write("jobs", pa.Table.from_pylist(jobs(), schema=JOBS))
    store.of("lab").set_watermark("sacct", T0 + DAYS * 86400)
    return folder / "almanac.toml", folder / "store"


def called(*arguments: object, config: Path | None = None, store: Path | None = None) -> Result:
    app = App(config_path=str(config) if config else None, store_path=str(store) if store else None)
    return CliRunner().invoke(power, [str(a) for a in arguments], obj=app)


def test_the_tables_fit_a_terminal_and_the_picture_is_drawn(series: Path, tmp_path: Path) -> None:
    done = called("--series", series, "--plot", tmp_path / "power.png")
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("note"))
    assert all(name in done.stdout for name in ("vanilla", "CES (paper), warm", "hour of day", "almanac", "oracle"))
    assert "late: unknown, because the file has no jobs" in done.stdout
    assert "money: unknown; set cost.per_kwh" in done.stdout
    assert (tmp_path / "power.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_names_spans_budget_and_every_controller(series: Path) -> None:
    done = called("--series", series, "-S", "2026-01-14", "--train-until", "2026-01-10", "--boots", "9", "--json")
    found = json.loads(done.stdout)
    assert found["spans"] == {"tune": "2026-01-10T00:00", "score": "2026-01-14T00:00", "end": "2026-01-21T00:00"}
    assert found["budget"] == {"boots_per_day": 9.0, "short_min_per_day": 2.0, "wakes_per_day": None}
    assert len(found["controllers"]) == 13 + (found["forecast_used"] != "persistence")
    assert [each["kind"] for each in found["forecasts"]] == ["persistence", "hour of day", "model"]
    assert (
        {score["jobs"] for score in found["controllers"]}
        == {score["money"] for score in found["controllers"]}
        == {None}
    )
    assert found == json.loads(called("--series", series, "-S", "2026-01-14", "--train-until", "2026-01-10",
                                      "--boots", "9", "--json").stdout)  # fmt: skip


def test_what_cannot_be_understood_is_refused(series: Path, tmp_path: Path) -> None:
    assert called("--series", series, "-S", "soon").exit_code == 2
    assert called("--series", series, "--plot", tmp_path / "power.gif").exit_code == 2
    assert called("--series", tmp_path / "absent.csv").exit_code == 2
    assert called("--series", series, "--node-set", "gpu").exit_code == 2
    assert called("--vc", "gpu").exit_code == 2
    assert isinstance(called("--series", series, "--vc", "x").exception, FileFormatError)


def test_the_store_gives_jobs_too(site: tuple[Path, Path], tmp_path: Path) -> None:
    done = called("--plot", tmp_path / "power.svg", config=site[0], store=site[1])
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("note"))
    assert "lab gpu: 320 jobs read, 320 kept" in done.stdout and "EUR" in done.stdout
    assert (tmp_path / "power.svg").read_bytes().startswith(b"<?xml")


def test_nodes_power_down_as_the_configuration_limits_them(site: tuple[Path, Path], tmp_path: Path) -> None:
    """Nodes that stay on for 6 hours after their work sleep less; nothing else changes."""
    (tmp_path / "slow.toml").write_text(CONFIG.replace("[cost]", "cooldown_s = 21600\n[cost]"))
    asleep = []
    for config in (site[0], tmp_path / "slow.toml"):
        found = json.loads(called("--json", config=config, store=site[1]).stdout)
        asleep.append({score["controller"]: score["asleep"] for score in found["controllers"]})
    assert asleep[1]["keep warm"] < 0.7 * asleep[0]["keep warm"]
    assert asleep[1]["vanilla"] == asleep[0]["vanilla"] == 0


def test_late_jobs_and_prices_by_the_configuration(site: tuple[Path, Path], tmp_path: Path) -> None:
    found = json.loads(called("--json", "--node-set", "gpu", config=site[0], store=site[1]).stdout)
    assert (found["node_set"], found["nodes"], found["jobs"], found["boot_min"]) == ("gpu", 20, 320, 4)
    scores = {score["controller"]: score for score in found["controllers"]}
    assert scores["vanilla"]["jobs"] == {"jobs": 76, "delayed": 0, "mean_min": None, "longest_min": None}
    assert scores["oracle"]["jobs"]["delayed"] == 0
    for score in scores.values():
        is_short = score["short_min_per_day"] > 0
        assert (score["jobs"]["delayed"] > 0) == is_short, "each node runs one job: who is short delays one"
        assert (score["jobs"]["longest_min"] or 0) <= 5, "a woken node is up 4 minutes after it was missed"
        assert score["money"] == pytest.approx(score["kwh"] * 0.25)
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("boot_min = 4", "boot_min = 30").replace("0.25", "1.0"))
    slow = json.loads(called("--json", config=other, store=site[1]).stdout)
    late = {score["controller"]: score["jobs"]["longest_min"] or 0 for score in slow["controllers"]}
    assert max(late.values()) > 5
    assert slow["controllers"][-1]["money"] == pytest.approx(slow["controllers"][-1]["kwh"])


@pytest.mark.parametrize(
    ("config", "arguments", "error", "said"),
    [
        ('[site]\ncluster = "lab"\n', [], ConfigError, "names no node set"),
        (CONFIG + '[[node_sets]]\nname = "b"\nnodes = "m1"\n', [], ConfigError, "2 node sets"),
        (CONFIG + '[[node_sets]]\nname = "b"\nnodes = "m1"\n', ["--node-set", "b"], ConfigError, "none of its 1 nodes"),
        (CONFIG.replace("n[01-20]", "n[01-"), [], ConfigError, "hostlist"),
        (CONFIG.replace("nodes =", "feature ="), [], CommandError, "Slurm did not list its nodes"),
        (CONFIG.replace('"lab"', '"other"'), [], StoreError, "no ended job of other"),
        (CONFIG, ["-E", "2026-01-10"], RequestError, "the store holds the demand of 4.6 days"),
        (CONFIG, ["-E", "2020-01-10"], RequestError, "from 2026-01-05 10:30 to 2026-01-21 00:00"),
    ],
)  # fmt: skip
def test_faults_say_what_to_do(
    site: tuple[Path, Path], tmp_path: Path, config: str, arguments: list[str], error: type[Exception], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "almanac.toml").write_text(config + f'[slurm]\nbin_dir = "{tmp_path}"\n')
    fault = called(*arguments, config=tmp_path / "almanac.toml", store=site[1]).exception
    assert isinstance(fault, error) and said in str(fault), fault
    assert fault.hint  # type: ignore[attr-defined]


def test_the_store_is_for_operators(site: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, series: Path) -> None:
    monkeypatch.setattr(App, "is_operator", False)
    assert isinstance(called(config=site[0], store=site[1]).exception, NotAllowedError)
    assert called("--series", series, config=site[0]).exit_code == 0
