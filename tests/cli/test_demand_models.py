"""`almanac train`, `models`, `doctor` and `metrics` with node sets: set by set, in words that say what to do."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from advisor.power.replay import Plant
from advisor.power.versions import trained_sets
from almanac.config import NodeSet
from almanac.errors import CommandError, ConfigError
from almanac.exposition import exposition
from cli.app import App
from cli.demo import CONFIG, NODE_SETS, show_power
from cli.doctor.site import check_demand
from cli.metrics import power_metrics
from cli.models import command as models
from cli.models import node_names
from cli.train import train_demand_models
from demo import SiteShape, host_names
from slurm.node_sets import LiveDemand
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.power.nodes import NodeSetState, NodeState, PowerState
from telemetry.power.demand import append_counts
from telemetry.store.schema import JOBS, NODE_COUNTS
from telemetry.store.store import Store

if TYPE_CHECKING:
    from command_line import CommandLine

DAY_S = 86_400
SETS = '[site]\ncluster = "c"\n[[node_sets]]\nname = "a100"\nnodes = "n[1-20]"\n'
NOT_THERE = '[slurm]\nbin_dir = "/nonexistent"\n'


class Clocked(App):
    """An operator, at a time that the test sets."""

    is_operator = True
    time_s = int(time.time())

    def now_s(self) -> int:
        return self.time_s


def jobs(now_s: int, days: int) -> pa.Table:
    """Work of 10 nodes on weekdays from 8 to 20 h, in jobs of 50 minutes; and one node all the time."""
    rows = []
    for number in range(days * 24):
        start_s = now_s - (days * 24 - number) * 3600
        hour = start_s // 3600 % 24
        hosts = "n[1-10]" if 8 <= hour < 20 else "n1"
        rows.append({
            "job_id": number + 1, "submit_s": start_s - 5, "start_s": start_s, "end_s": start_s + 3000,
            "state": "COMPLETED", "user": "u", "partition": "gpu", "node_list": hosts, "node_count": 1, "gpu_count": 4,
            "elapsed_s": 3000,
        })  # fmt: skip
    return pa.Table.from_pylist(rows, schema=JOBS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 13 days with a model of a100."""
    folder = tmp_path_factory.mktemp("trained")
    app = make(folder, SETS)
    store = Store.create(folder / "store")
    store.of("c").write("jobs", jobs(app.now_s(), 13))
    [outcome] = train_demand_models(app)
    assert "fault" not in outcome
    return folder


def make(folder: Path, config: str) -> Clocked:
    (folder / "almanac.toml").write_text(config)
    return Clocked(str(folder / "almanac.toml"), str(folder / "store"))


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "site")
    return tmp_path / "site"


def run(app: App, *argv: str) -> str:
    done = CliRunner().invoke(models, list(argv), obj=app)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def checks(app: App) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, f"{check.said}|{check.todo}") for check in check_demand(app)}


def metrics(app: App) -> dict[str, float]:
    lines = exposition(list(power_metrics(app, app.open_store()))).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_the_demos_node_sets_are_its_nodes() -> None:
    hosts = host_names(SiteShape.demo())
    app = App()
    app.__dict__["config"] = None
    names = [node_names(app, NodeSet(name="x", nodes=line.split('"')[1]))
             for line in NODE_SETS.splitlines() if line.startswith("nodes")]  # fmt: skip
    assert [len(each) for each in names] == [14, 8]
    assert [name for each in names for name in each] == hosts
    assert NODE_SETS in CONFIG


def test_the_demo_ends_with_a_back_test_and_a_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a set without a model, whose nodes all stay on."""
    show_power(make(place, SETS + '[[node_sets]]\nname = "new"\nnodes = "m[1-3]"\n'))
    said = capsys.readouterr().out
    assert "$ almanac backtest power --node-set a100" in said
    assert "oracle" in said
    rows = [line.split(maxsplit=6) for line in said.partition("Plan at")[2].splitlines()]
    plans = {row[0]: row for row in rows if row[:1] in (["a100"], ["new"])}
    total, kept, down = (int(plans["a100"][place]) for place in (1, 4, 5))
    assert (total, kept + down) == (20, 20)
    assert plans["new"][1:6] == ["3", *["-"] * 4]
    assert "no model is trained for node set new" in plans["new"][6]


def test_training_replays_the_configured_limits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plant] = []

    def watched(*args: Any, plant: Plant, **more: Any) -> None:
        seen.append(plant)
        raise ValueError("enough")

    monkeypatch.setattr("advisor.power.lifecycle.train_demand", watched)
    app = make(place, SETS + "[power]\nboot_min = 9\ncooldown_s = 7200\n")
    [outcome] = train_demand_models(app)
    assert "enough" in outcome["fault"]
    assert seen == [Plant(boot_min=9, cooldown_steps=12)]


def test_too_little_data_is_said_and_stops_no_other_training(site: CommandLine) -> None:
    """Four days, with the two node sets of the demo."""
    done = site.raw("--config", str(site.folder / "almanac.toml"), "--store", str(site.folder / "store"), "train")
    assert done.returncode == 0, done.stderr
    assert "trained on" in done.stdout
    for name in ("hbm40g", "hbm80g"):
        assert f"node set {name}: not trained: the record has " in done.stderr
    assert "days of demand, at least 8 are needed" in done.stderr
    assert [each["node_set"] for each in site.json("train", "--json")["demand"] if each["fault"]] == [
        "hbm40g",
        "hbm80g",
    ]


def test_a_set_that_cannot_be_trained_stops_no_other(place: Path) -> None:
    config = (
        SETS
        + NOT_THERE
        + "".join(
            f'[[node_sets]]\nname = "{name}"\n{selector}\n'
            for name, selector in (
                ("strange", 'nodes = "n[1-"'),
                ("asked", 'feature = "h100"'),
                ("idle", 'nodes = "m[1-4]"'),
            )
        )
    )
    app = make(place, config)
    found = {each["node_set"]: each for each in train_demand_models(app)}
    assert "fault" not in found["a100"]
    assert "is not a hostlist" in found["strange"]["fault"]
    assert "scontrol was not found" in found["asked"]["fault"]
    assert "none of its 4 nodes (m1, ...) was in use" in found["idle"]["fault"]
    assert trained_sets(app.open_store().of("c").models_dir) == ["a100"]
    assert train_demand_models(make(place, config + '[power]\nmode = "off"\n')) == []


def test_names_of_a_feature_come_from_slurm_and_its_silence_is_an_error(place: Path) -> None:
    app = make(place, SETS + NOT_THERE)
    with pytest.raises(CommandError):
        node_names(app, NodeSet(name="x", feature="a100"))
    with pytest.raises(ConfigError, match="not a hostlist"):
        node_names(app, NodeSet(name="x", nodes="n[9-1]x["))


def test_versions_are_listed_and_gone_back_to(place: Path) -> None:
    app = make(place, SETS)
    app.time_s += 60
    [outcome] = train_demand_models(app)
    text = run(app)
    assert "no model is trained yet" in text, "of durations"
    assert text.count(" a100 ") == 2
    newest, oldest = outcome["version"], json.loads(run(app, "--node-set", "a100", "--json"))[0]["name"]
    assert newest != oldest
    assert next(line for line in text.splitlines() if line.startswith("*")).split()[2] == newest
    assert (
        next(
            line for line in run(app, "--node-set", "a100", "--use", "previous").splitlines() if line[0] == "*"
        ).split()[2]
        == oldest
    )
    assert json.loads(run(app, "--node-set", "a100", "--use", newest, "--json"))[1]["is_current"] is True
    assert "no model is trained yet for node set other" in run(app, "--node-set", "other")


def test_a_damaged_version_is_listed_as_such_and_doctor_says_what_to_do(place: Path) -> None:
    app = make(place, SETS)
    folder = app.open_store().of("c").models_dir / "demand" / "node_set=a100"
    next(folder.glob("*/model.json")).write_text("{}")
    assert "unusable" in run(app)
    status, said = checks(app)["demand of a100"]
    assert status == "warn"
    assert "damaged" in said
    assert "almanac train" in said
    assert not [name for name in metrics(app) if "model" in name]


def test_doctor_finds_what_is_amiss(place: Path) -> None:
    app = make(place, SETS)
    store = app.open_store()
    found = checks(app)
    assert found["demand of a100"][0] == "ok"
    assert found["power runs of a100"] == (
        "warn",
        "none in the last 7 days|add the task power on the controller",
    )
    append_counts(store.of("c"), "a100", app.time_s - 600, LiveDemand(20, 5, 0, 3))
    assert checks(app)["power runs of a100"][0] == "ok"
    app.time_s += 2 * 3600
    assert "nodes counted 2 h" in checks(app)["power runs of a100"][1]
    app.time_s += 20 * DAY_S
    assert "trained 20 days ago, the limit is 14" in checks(app)["demand of a100"][1]
    app.time_s -= 60 * DAY_S
    assert "by a clock that was ahead" in checks(app)["demand of a100"][1]


def test_doctor_warns_of_a_budget_exceeded_by_far(place: Path) -> None:
    app = make(place, SETS)
    store = app.open_store()
    rows = [
        {"node_set": "a100", "time_s": app.time_s // 60 * 60 - (200 - number) * 600, "total": 20, "active": 5,
         "wanted": 20, "asleep": 3 + number % 2}
        for number in range(200)
    ]  # fmt: skip
    store.of("c").write("node_counts", pa.Table.from_pylist(rows, schema=NODE_COUNTS))
    status, said = checks(app)["demand of a100"]
    assert status == "warn"
    assert "99 node boots in 1.4 days, the budget is 2 a day" in said
    assert "short minutes in 1.4 days" in said


@pytest.mark.parametrize("config", [
    SETS.replace('"a100"', '"renamed"'), '[site]\ncluster = "c"\n[[node_sets]]\nname = "b"\nnodes = "n1"\n',
])  # fmt: skip
def test_a_set_that_was_renamed_or_removed_is_named(place: Path, config: str) -> None:
    found = checks(make(place, config))
    assert "models exist for node sets that are not configured: a100" in found["demand models"][1]
    assert not any("a100" in name for name in found if name != "demand models")


def test_nodes_that_changed_need_a_training(place: Path) -> None:
    status, said = checks(make(place, SETS.replace("n[1-20]", "n[1-30]")))["demand of a100"]
    assert status == "warn"
    assert "trained for nodes n[1-20], and the node set is now nodes n[1-30]" in said


def test_nothing_is_said_without_node_sets_or_with_power_off(place: Path) -> None:
    assert checks(make(place, '[site]\ncluster = "c"\n')) == {}
    assert checks(make(place, SETS + '[power]\nmode = "off"\n')) == {}


def test_metrics_by_hand(place: Path) -> None:
    app = make(place, SETS)
    store = app.open_store()
    for minutes, demand in ((120, (20, 5, 0, 10)), (110, (20, 9, 4, 10)), (100, (20, 13, 0, 5)), (30, (20, 13, 0, 5))):
        append_counts(store.of("c"), "a100", app.time_s - minutes * 60, LiveDemand(*demand))
    sets = {"a100": NodeSetState(target=15, forecast=((0.5, 11.5), (0.95, 14.0))), "b": NodeSetState(target=None)}
    nodes = {"n1": NodeState(quarantined_s=5), "n2": NodeState(retries=1)}
    memory = PowerState("c", 1, app.time_s - 1800, nodes, sets)
    folder = NodeFolder(store.root / "power", PowerState)
    with folder.lock():
        folder.save(memory)
    found = metrics(app)
    labels = 'cluster="c",node_set="a100"'
    assert {state: found[f'almanac_power_nodes{{{labels},state="{state}"}}']
            for state in ("total", "active", "wanted", "asleep")} == {
        "total": 20, "active": 13, "wanted": 0, "asleep": 5,
    }  # fmt: skip
    day = {name: found[f"almanac_power_day_{name}{{{labels}}}"]
           for name in ("wakeups", "short_minutes", "asleep_node_hours", "known_share")}  # fmt: skip
    assert day["wakeups"] == 1
    assert day["short_minutes"] == 10, "at minute -110 one was idle, and four were wanted"
    assert day["asleep_node_hours"] == pytest.approx((20 * 10 + 40 * 5) / 60, abs=0.2)
    assert day["known_share"] == pytest.approx(60 / 1440, abs=0.001)
    assert found[f"almanac_power_target_nodes{{{labels}}}"] == 15
    assert 'almanac_power_target_nodes{cluster="c",node_set="b"}' not in found
    forecast = {labels: value for labels, value in found.items() if labels.startswith("almanac_power_forecast_nodes")}
    assert forecast == {f'almanac_power_forecast_nodes{{{labels},quantile="{quantile}"}}': nodes
                        for quantile, nodes in (("0.5", 11.5), ("0.95", 14))}  # fmt: skip
    assert found['almanac_power_quarantined_nodes{cluster="c"}'] == 1
    assert found['almanac_power_hold{cluster="c"}'] == 0
    assert found[f"almanac_power_drift_alarms{{{labels}}}"] == 0
    folder.hold("root", "rack work", app.time_s)
    assert metrics(app)['almanac_power_hold{cluster="c"}'] == 1
    app.time_s += 3601
    assert not [name for name in metrics(app) if name.startswith("almanac_power_nodes")], "an hour without a run"
    (store.root / "power" / "state.json").write_text("[")
    assert not [name for name in metrics(app) if "target" in name or "quarantined" in name]
    assert metrics(app)['almanac_power_hold{cluster="c"}'] == 1, "it is known without the state"


def test_of_a_site_without_node_power_nothing_is_said(tmp_path: Path) -> None:
    app = make(tmp_path, '[site]\ncluster = "c"\n')
    store = Store.create(tmp_path / "store")
    assert metrics(app) == {}
    store.of("c").write("jobs", jobs(app.now_s(), 1))
    assert metrics(app) == {}


def test_training_again_finds_drift(place: Path) -> None:
    """A week in which all nodes are suddenly in use by turns."""
    app = make(place, SETS)
    store = app.open_store()
    rows: list[dict[str, Any]] = []
    for number in range(7 * 24):
        start_s = app.time_s + number * 3600
        rows.append({
            "job_id": 10_000 + number, "submit_s": start_s - 5, "start_s": start_s, "end_s": start_s + 3000,
            "user": "u", "state": "COMPLETED", "partition": "gpu", "node_list": "n[1-20]" if number % 7 == 3 else "n1",
            "node_count": 1, "gpu_count": 4, "elapsed_s": 3000,
        })  # fmt: skip
    store.of("c").write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    app.time_s += 7 * DAY_S
    [outcome] = train_demand_models(app)
    assert "fault" not in outcome
    assert any("pinball loss" in alarm for alarm in outcome["drift"])
    assert metrics(app)['almanac_power_drift_alarms{cluster="c",node_set="a100"}'] >= 1
    assert "pinball loss" in checks(app)["demand of a100"][1]
