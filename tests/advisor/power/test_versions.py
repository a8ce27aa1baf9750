"""Demand models on disk: what was saved is loaded, damage is an error with a remedy, old versions stay usable."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from advisor.power.decide import Budget
from advisor.power.lifecycle import faults_of_demand, usable_demand
from advisor.power.model import DemandModel, train_demand
from advisor.power.versions import (
    demand_versions,
    load_demand,
    roll_back_demand,
    save_demand,
    selection_of,
    trained_sets,
    use_demand,
)
from almanac.config import NodeSet
from almanac.errors import DamageWarning, SchemaVersionError, StoreError
from telemetry.power.series import NodeSeries

NOW_S = 1_795_003_200
DAY_S = 86_400
A100 = NodeSet(name="a100", feature="a100", exclude="gpu7")
SPAN_S = (NOW_S - 9 * DAY_S, NOW_S)


@cache
def trained() -> DemandModel:
    minutes = np.arange(9 * 1440)
    noise = np.random.default_rng(0).normal(0, 2, len(minutes))
    active = np.clip(np.round(50 + 30 * np.sin(minutes * 2 * np.pi / 1440) + noise), 0, 100)
    series = NodeSeries(
        np.datetime64("2026-11-01", "m"), active, np.full(len(minutes), 100.0), active * np.nan,
        np.ones(len(minutes), dtype=bool),
    )  # fmt: skip
    return train_demand(series, Budget(60, 20), seed=1)


@pytest.fixture
def model() -> DemandModel:
    return trained()


def save(folder: Path, model: DemandModel, now_s: int = NOW_S, node_set: NodeSet = A100, keep: int = 10) -> str:
    return save_demand(folder, node_set, model, now_s, SPAN_S, ["drifted"], keep)


def home(folder: Path, node_set: str = "a100") -> Path:
    return folder / "demand" / f"node_set={node_set}"


def test_what_was_saved_is_loaded(model: DemandModel, tmp_path: Path) -> None:
    assert load_demand(tmp_path, "a100") is None
    version = save(tmp_path, model)
    found = load_demand(tmp_path, "a100")
    assert (found.version, found.trained_s, found.since_s, found.until_s) == (version, NOW_S, *SPAN_S)
    assert found.selection == "feature a100, without gpu7"
    assert found.drift == ("drifted",)
    assert found.model.to_files() == model.to_files()
    assert trained_sets(tmp_path) == ["a100"]


def test_files_are_the_groups_to_read_and_nobody_elses(model: DemandModel, tmp_path: Path) -> None:
    version = save(tmp_path, model)
    modes = {path.stat().st_mode & 0o777 for path in (home(tmp_path) / version).iterdir()}
    assert modes == {0o640}
    assert (home(tmp_path) / version).stat().st_mode & 0o777 == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_trains_belongs_to_the_owner_of_the_store(model: DemandModel, tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    save(tmp_path / "cluster=c", model)
    assert {path.stat().st_uid for path in (tmp_path / "cluster=c").rglob("*")} == {65534}


@pytest.mark.parametrize("name", ["..", ".", "-rf", "current", ".lock", "a" * 64])
def test_no_name_of_a_node_set_leaves_its_folder(model: DemandModel, tmp_path: Path, name: str) -> None:
    version = save(tmp_path / "models", model, node_set=NodeSet(name=name, nodes="n1"))
    found = load_demand(tmp_path / "models", name)
    assert found.version == version
    assert {path.name for path in tmp_path.iterdir()} == {"models"}
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"demand"}
    assert trained_sets(tmp_path / "models") == [name]


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a\nb", "a" * 65, "é"])
def test_a_name_that_no_node_set_can_have_is_refused(model: DemandModel, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a node set"):
        save(tmp_path, model, node_set=NodeSet(name=name, nodes="n1"))
    with pytest.raises(StoreError, match="cannot name a node set"):
        load_demand(tmp_path, name)


DAMAGES: dict[str, Any] = {
    "current is empty": lambda folder, version: (folder / "current").write_text(""),
    "current leaves": lambda folder, version: (folder / "current").write_text("../../etc"),
    "current is another": lambda folder, version: (folder / "current").write_text("20990101T000000Z"),
    "current is no text": lambda folder, version: (folder / "current").write_bytes(b"\xff\xfe"),
    "no meta": lambda folder, version: (folder / version / "meta.json").unlink(),
    "half a meta": lambda folder, version: (folder / version / "meta.json").write_text('{"schema": 1'),
    "meta is a list": lambda folder, version: (folder / version / "meta.json").write_text("[1]"),
    "meta is deep": lambda folder, version: (folder / version / "meta.json").write_text("[" * 100_000),
    "no checksums": lambda folder, version: _edit(folder / version, lambda meta: meta.pop("sha256")),
    "a number is a word": lambda folder, version: _edit(folder / version, lambda meta: meta.update(trained_s="now")),
    "outside": lambda folder, version: _edit(folder / version, lambda meta: meta["sha256"].update({"../../x.txt": ""})),
    "no model": lambda folder, version: _edit(folder / version, lambda meta: meta.update(sha256={})),
    "a text is gone": lambda folder, version: (folder / version / "model.json").unlink(),
}


def _edit(folder: Path, change: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_with_a_remedy_and_ends_no_other_node_set(
    model: DemandModel, tmp_path: Path, damage: str
) -> None:
    version = save(tmp_path, model)
    other = NodeSet(name="other", nodes="n1")
    save(tmp_path, model, node_set=other)
    DAMAGES[damage](home(tmp_path), version)
    if damage.startswith("current"):  # the newest whole version stands in
        with pytest.warns(DamageWarning):
            assert load_demand(tmp_path, "a100").version == version
        return
    with pytest.raises(StoreError) as error:
        load_demand(tmp_path, "a100")
    assert "almanac train" in error.value.hint
    found, why = usable_demand(tmp_path, A100, NOW_S)
    assert found is None
    assert "almanac train" in why
    assert usable_demand(tmp_path, other, NOW_S)[0] is not None
    again = save(tmp_path, model, NOW_S + 1)
    assert usable_demand(tmp_path, A100, NOW_S + 1)[0].version == again  # type: ignore[union-attr]


@examples(0.6)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(0, 99))
def test_no_flipped_bit_of_a_model_is_used(tmp_path: Path, place: float, bit: int, which: int) -> None:
    version = save(tmp_path, trained(), keep=1)
    names = sorted(trained().to_files())
    path = home(tmp_path) / version / names[which % len(names)]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(bytes(content))
    with pytest.raises(StoreError):
        load_demand(tmp_path, "a100")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda meta: meta.update(schema=99), "schema 99"),
        # LightGBM would raise an error of its own in the middle of a power run.
        (lambda meta: meta["features"].pop(), "trained on other features"),
    ],
)
def test_a_model_of_another_schema_or_features_is_not_used(
    model: DemandModel, tmp_path: Path, change: Any, fault: str
) -> None:
    _edit(home(tmp_path) / save(tmp_path, model), change)
    with pytest.raises(SchemaVersionError, match=fault):
        load_demand(tmp_path, "a100")
    why = usable_demand(tmp_path, A100, NOW_S)[1]
    assert fault in why and "almanac train" in why


def test_versions_are_listed_gone_back_to_and_chosen(model: DemandModel, tmp_path: Path) -> None:
    names = [save(tmp_path, model, NOW_S + number) for number in range(3)]
    assert [each.name for each in demand_versions(tmp_path, "a100")] == names
    (home(tmp_path) / names[1] / "model.json").write_text("{}")
    assert [bool(each.fault) for each in demand_versions(tmp_path, "a100")] == [False, True, False]
    assert roll_back_demand(tmp_path, "a100") == names[0]
    with pytest.raises(StoreError, match="no version to go back to"):
        roll_back_demand(tmp_path, "a100")
    with pytest.raises(StoreError, match="damaged"):
        use_demand(tmp_path, "a100", names[1])
    with pytest.raises(StoreError, match="not a trained version"):
        use_demand(tmp_path, "a100", "../..")
    use_demand(tmp_path, "a100", names[2])
    assert [each.is_current for each in demand_versions(tmp_path, "a100")] == [False, False, True]


def test_old_versions_and_what_a_killed_training_left_are_removed(model: DemandModel, tmp_path: Path) -> None:
    first = save(tmp_path, model)
    (home(tmp_path) / ".new-killed").mkdir()
    (home(tmp_path) / ".new-killed" / "meta.json").write_text("{")
    names = [save(tmp_path, model, NOW_S + number, keep=2) for number in (1, 2)]
    assert [each.name for each in demand_versions(tmp_path, "a100")] == names
    assert first not in names
    assert {path.name for path in home(tmp_path).iterdir()} == {*names, "current", ".lock"}


def test_a_clock_that_was_ahead_keeps_no_version_in_use(model: DemandModel, tmp_path: Path) -> None:
    ahead = save(tmp_path, model, NOW_S + 365 * DAY_S)
    assert "trained 365 days in the future" in usable_demand(tmp_path, A100, NOW_S)[1]
    now = save(tmp_path, model, keep=1)
    assert [each.name for each in demand_versions(tmp_path, "a100")] == [now]
    assert now < ahead
    assert usable_demand(tmp_path, A100, NOW_S)[0] is not None


def _train(folder: Path, model: DemandModel) -> None:
    for _ in range(5):
        save(folder, model)


def test_trainings_at_once_leave_whole_versions(model: DemandModel, tmp_path: Path) -> None:
    """Four processes, in the same second."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_train, args=(tmp_path, model)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    found = demand_versions(tmp_path, "a100")
    assert [each.fault for each in found] == [""] * 10
    assert [each.is_current for each in found] == [*[False] * 9, True]


def test_a_model_is_used_for_the_nodes_and_the_time_that_it_was_trained_for(model: DemandModel, tmp_path: Path) -> None:
    assert "no model is trained for node set a100" in usable_demand(tmp_path, A100, NOW_S)[1]
    save(tmp_path, model)
    found = load_demand(tmp_path, "a100")
    assert found is not None
    assert faults_of_demand(found, A100, NOW_S + 14 * DAY_S) == []
    assert "trained 15 days ago, the limit is 14" in faults_of_demand(found, A100, NOW_S + 15 * DAY_S)[0]
    without = dataclasses.replace(A100, exclude="")
    for other in (without, dataclasses.replace(A100, feature="h100"), NodeSet(name="a100", nodes="gpu[1-9]")):
        faults = faults_of_demand(found, other, NOW_S)
        assert faults == [f"trained for feature a100, without gpu7, and the node set is now {selection_of(other)}"]
    assert usable_demand(tmp_path, NodeSet(name="renamed", feature="a100"), NOW_S)[0] is None
