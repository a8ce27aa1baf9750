"""`almanac backtest power` on a series file: table, JSON, picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from almanac.errors import FileFormatError
from cli.backtest_power import power


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    minutes = np.arange(12 * 1440)
    frame = pd.DataFrame({
        "time": pd.Timestamp("2026-01-05") + pd.to_timedelta(minutes, "min"),
        "active": np.round(10 + 6 * np.sin(minutes * 2 * np.pi / 1440)).astype(int), "total": 20,
    })  # fmt: skip
    path = tmp_path_factory.mktemp("series") / "set.parquet"
    frame.to_parquet(path)
    return path


def called(*arguments: object) -> Result:
    return CliRunner().invoke(power, [str(a) for a in arguments])


def test_the_table_fits_a_terminal_and_the_picture_is_drawn(series: Path, tmp_path: Path) -> None:
    done = called("--series", series, "--plot", tmp_path / "power.png")
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("note"))
    assert all(name in done.stdout for name in ("vanilla", "CES (paper)", "shuffled", "almanac", "oracle"))
    assert (tmp_path / "power.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_names_spans_budget_and_every_controller(series: Path) -> None:
    done = called("--series", series, "-S", "2026-01-14", "--train-until", "2026-01-10", "--wakeups", "2", "--json")
    found = json.loads(done.stdout)
    assert found["spans"] == {"tune": "2026-01-10T00:00", "score": "2026-01-14T00:00", "end": "2026-01-17T00:00"}
    assert found["budget"] == {"wakes_per_day": 2.0, "short_min_per_day": 2.0}
    assert len(found["controllers"]) == 8 and len(found["forecasts"]) == 9
    assert found == json.loads(called("--series", series, "-S", "2026-01-14", "--train-until", "2026-01-10",
                                      "--wakeups", "2", "--json").stdout)  # fmt: skip


def test_what_cannot_be_understood_is_refused(series: Path, tmp_path: Path) -> None:
    assert called("--series", series, "-S", "soon").exit_code == 2
    assert called("--series", series, "--plot", tmp_path / "power.gif").exit_code == 2
    assert called("--series", tmp_path / "absent.csv").exit_code == 2
    assert isinstance(called("--series", series, "--vc", "x").exception, FileFormatError)
