"""Node power in the site report: hand-computed savings, what is not known, and what the page, the text and CSV say."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from almanac.config import Config, Cost, NodeSet, Power
from cli.app import App
from cli.site_report import command
from reports.site.page import render_site_page
from reports.site.plots import _steps, render_power_plots
from reports.site.power import NodeSetPower, load_power, power_rows, power_table
from reports.site.report import build_site_report
from reports.site.tables import write_csv
from slurm.node_sets import LiveDemand
from telemetry.power.demand import append_counts
from telemetry.site import Site
from telemetry.store.schema import NODE_COUNTS
from telemetry.store.store import Store

NOW_S = 1_795_003_200
HOUR_S, DAY_S = 3600, 86_400
SPAN_S = (NOW_S - DAY_S, NOW_S)
CONFIG = Config(
    node_sets=(NodeSet(name="a100", nodes="a[1-10]"), NodeSet(name="h100", nodes="h[1-4]")),
    power=Power(idle_watts=500, asleep_watts=20, pue=1.25, co2_kg_per_kwh=0.3),
    cost=Cost(per_kwh=0.2, currency="EUR"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Half a day of a100: four of ten nodes asleep, then one of them awake; in the middle a shortage of one run."""
    store = Store.create(tmp_path_factory.mktemp("power") / "store")
    demand = [LiveDemand(10, 2, 7 if number == 36 else 0, 4 if number <= 36 else 3) for number in range(72)]
    write(store, "c", demand)
    return store


def write(store: Store, cluster: str, demand: Sequence[LiveDemand]) -> None:
    """One count of a100 every 10 minutes, the last one 10 minutes ago."""
    rows = [
        {"node_set": "a100", "time_s": NOW_S - (len(demand) - number) * 600, **dataclasses.asdict(each)}
        for number, each in enumerate(demand)
    ]
    store.of(cluster).write("node_counts", pa.Table.from_pylist(rows, schema=NODE_COUNTS))


def test_savings_by_hand(store: Store) -> None:
    found = {each.name: each for each in load_power(Site.of(store.of("c"), CONFIG, NOW_S), SPAN_S)}
    a100 = found["a100"]
    assert a100.use.coverage == 0.5
    hours = (37 * 4 + 35 * 3) / 6
    assert a100.use.asleep_hours == pytest.approx(hours)
    assert a100.saved_kwh == pytest.approx(hours * 0.480 * 1.25)
    assert a100.saved_cost == pytest.approx(hours * 0.480 * 1.25 * 0.2)
    assert a100.saved_co2_kg == pytest.approx(hours * 0.480 * 1.25 * 0.3)
    assert (len(a100.use.wake_times_s), a100.use.short_min) == (1, 10)
    assert found["h100"] == NodeSetPower("h100", None, None, None, None), "missing is not zero"


def test_the_table_says_what_is_known_and_what_is_not(store: Store) -> None:
    table = power_table(load_power(Site.of(store.of("c"), CONFIG, NOW_S), SPAN_S), CONFIG)
    first, second = table.cells
    assert first == [
        "a100", "50%", "120", "24 (20%)", "42.2 (35%)", "25.3 kWh", "5.06 EUR", "7.59 kg", "1 (2.0 a day)",
        "10 (20.0 a day)",
    ]  # fmt: skip
    assert second == ["h100", "0%", *["not known"] * 8]
    assert "(500 W - 20 W) x PUE 1.25, with 0.3 kg of CO2 per kWh" in table.note


def test_without_a_price_there_is_no_column_of_costs(store: Store) -> None:
    config = dataclasses.replace(CONFIG, cost=Cost())
    table = power_table(load_power(Site.of(store.of("c"), config, NOW_S), SPAN_S), config)
    assert "Cost saved" not in table.columns
    assert {len(row) for row in table.cells} == {len(table.columns)} == {9}
    assert power_rows(load_power(Site.of(store.of("c"), config, NOW_S), SPAN_S)).to_pylist()[0]["saved_cost"] is None


def test_without_counts_it_says_so(store: Store) -> None:
    earlier = (NOW_S - 9 * DAY_S, NOW_S - 8 * DAY_S)
    said = power_table(load_power(Site.of(store.of("c"), CONFIG, NOW_S), earlier), CONFIG)
    assert said == "No data on a100, h100: no power run counted nodes in this span."
    none = power_table(load_power(Site.of(store.of("c"), Config(), NOW_S), earlier), Config())
    assert none == "", "a site without node sets has no such card"
    known = {each.name for each in load_power(Site.of(store.of("c"), Config(), NOW_S), SPAN_S)}
    assert known == {"a100"}, "counts of a set that was removed from the configuration are still counts"
    rows = power_rows(load_power(Site.of(store.of("c"), CONFIG, NOW_S), earlier)).to_pylist()
    assert [set(row.values()) - {row["node_set"]} for row in rows] == [{None}, {None}]


def test_a_store_of_400_days_is_added_up(tmp_path: Path) -> None:
    """57,600 counts of each of two sets, written at once."""
    store = Store.create(tmp_path / "store")
    rows = {"node_set": [], "time_s": []}  # type: dict[str, list[Any]]
    for number in range(400 * 144):
        for name in ("a100", "h100"):
            rows["node_set"].append(name)
            rows["time_s"].append(NOW_S - 400 * DAY_S + number * 600)
    size = len(rows["time_s"])
    numbers = {"total": [10] * size, "active": [2] * size, "wanted": [0] * size, "asleep": [5] * size,
               "queued_node_min": [None] * size}  # fmt: skip
    store.of("c").write("node_counts", pa.Table.from_pydict({**rows, **numbers}, schema=NODE_COUNTS))
    found = load_power(Site.of(store.of("c"), CONFIG, NOW_S), (NOW_S - 400 * DAY_S, NOW_S))
    assert [each.use.asleep_hours for each in found if each.use] == [400 * 24 * 5] * 2


HOSTILE = '<script>alert(1)</script>\x1b[31m\u202e=cmd|"x"' + "A" * 500


def test_a_hostile_name_of_a_node_set_is_inert(reported: Any, tmp_path: Path) -> None:
    """The configuration refuses such names; the store's files could still hold one."""
    store = Store.create(tmp_path / "store")
    append_counts(store.of("c"), HOSTILE, NOW_S - 600, LiveDemand(10, 2, 0, 5))
    found = load_power(Site.of(store.of("c"), Config(), NOW_S), SPAN_S)
    report = build_site_report(Site.of(reported.store.of("test"), reported.config, NOW_S), SPAN_S)
    report = dataclasses.replace(report, power=found)
    page = render_site_page(report)
    assert "script&gt;alert(1)" in page
    assert "<script" not in page
    path = next(path for path in write_csv(report, tmp_path) if path.stem == "power")
    assert "\x1b" not in page + path.read_text()


@pytest.fixture(scope="module")
def pages(reported: Any, store: Store) -> dict[str, str]:
    """Pages of the hand-made site: with savings, and without counts."""
    report = build_site_report(Site.of(reported.store.of("test"), reported.config, NOW_S), (NOW_S - 40 * DAY_S, NOW_S))
    config = dataclasses.replace(reported.config, node_sets=CONFIG.node_sets, power=CONFIG.power, cost=CONFIG.cost)
    found = load_power(Site.of(store.of("c"), config, NOW_S), SPAN_S)
    return {
        "savings": render_site_page(dataclasses.replace(report, power=found, config=config)),
        "nothing": render_site_page(report),
    }


def card_of(page: str) -> str:
    return page.partition("<h2>Node power</h2>")[2].partition('<div class="card">')[0]


def test_the_page_has_the_table_or_says_why_not(pages: dict[str, str]) -> None:
    card = card_of(pages["savings"])
    assert re.findall(r"<td[^>]*>(.*?)</td>", card)[:2] == ["a100", "50%"]
    assert "25.3 kWh" in card
    assert "Node power" not in pages["nothing"]


def test_the_card_has_a_picture_of_the_last_days_with_its_words(pages: dict[str, str], store: Store) -> None:
    cards = {name: card_of(page) for name, page in pages.items()}
    [alt] = re.findall(r'<img class="picture" src="data:image/png;base64,[^"]+" alt="([^"]*)">', cards["savings"])
    assert alt == "Nodes of a100 over the last 7 days. At the end 2 are in use, 7 are powered, and 3 are asleep."
    assert "<img" not in cards["nothing"]
    found = load_power(Site.of(store.of("c"), CONFIG, NOW_S), (NOW_S - 40 * DAY_S, NOW_S))
    assert len(render_power_plots(found, NOW_S)) == 1, "of h100 there are no counts"
    assert render_power_plots(found, NOW_S) == render_power_plots(found, NOW_S)
    assert render_power_plots(found, NOW_S + 30 * DAY_S) == [], "the last days have none"


def test_where_nothing_was_counted_the_line_has_a_gap() -> None:
    times, level = _steps(np.array([0, 600, 3000, 3600]), np.array([4, 5, 6, 7]), 0, 4000)
    seconds = times.astype("datetime64[s]").astype(int).reshape(-1, 3)
    assert seconds[:, :2].tolist() == [[0, 600], [600, 1800], [3000, 3600], [3600, 4000]]
    assert np.isnan(level.reshape(-1, 3)[:, 2]).tolist() == [False, True, False, True]


def test_the_terminal_and_the_csv_file_say_the_same(reported: Any, tmp_path: Path) -> None:
    class Operator(App):
        is_operator = True

        def now_s(self) -> int:
            return NOW_S

    store = Store.open(shutil.copytree(reported.store.root, tmp_path / "site"))
    write(store, "test", [LiveDemand(10, 2, 0, 5)] * 144)
    (tmp_path / "almanac.toml").write_text('[[node_sets]]\nname = "a100"\nnodes = "a[1-10]"\n[cost]\nper_kwh = 0.1\n')
    app = Operator(str(tmp_path / "almanac.toml"), str(store.root), "test")
    done = CliRunner().invoke(command, ["-S", "now-1days"], obj=app)
    assert done.exit_code == 0, done.exception
    line = next(line for line in done.output.splitlines() if line.startswith("a100"))
    assert line.split()[:3] == ["a100", "100%", "240"]
    assert "144 kWh" in line
    done = CliRunner().invoke(command, ["-S", "now-1days", "--csv", str(tmp_path / "csv")], obj=app)
    assert done.exit_code == 0, done.exception
    with (tmp_path / "csv" / "power.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["node_set"], float(row["asleep_node_hours"]), float(row["saved_kwh"])) == ("a100", 120, 144)
    assert float(row["saved_cost"]) == pytest.approx(14.4)
