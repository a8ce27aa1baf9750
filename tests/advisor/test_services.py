"""Services: almanac's own by hand, and a site's own, whose faults cost that service alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from advisor import service as own_services
from advisor.artefacts import load_learned, prune, roll_back, save
from advisor.duration.features import AdviceRequest
from advisor.service import (
    Learned,
    SiteRecord,
    advise,
    load_own,
    own_advice,
    train,
    update_own,
)
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.errors import StoreError
from almanac.records import JobRequest
from telemetry.store.store import Store

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


class Longest:
    """The user's longest job, counted on over all that was seen."""

    def fetch(self, record: SiteRecord) -> pd.DataFrame:
        return record.history[record.history["end_s"] < record.now_s]

    def update(
        self, data: pd.DataFrame, previous: dict[str, float] | None, config: Config, now_s: int
    ) -> dict[str, float]:
        longest: dict[str, float] = data.groupby("user")["elapsed_s"].max().to_dict()
        return {user: max(seconds, (previous or {}).get(user, 0.0)) for user, seconds in longest.items()}

    def predict(self, asked: AdviceRequest, artefact: dict[str, float] | None) -> float | None:
        return (artefact or {}).get(asked.request.user)

    def advise(self, asked: AdviceRequest, predicted: float | None) -> Mapping[str, Any]:
        return {"longest_s": predicted}


class BreaksUpdate(Longest):
    """Also spoils what it was given."""

    def update(self, data: pd.DataFrame, previous: Any, config: Config, now_s: int) -> Any:
        previous.clear()
        raise SystemExit("no such table")

    def fetch(self, record: SiteRecord) -> pd.DataFrame:
        record.history["elapsed_s"] = 1e9
        return record.history


class BreaksPredict(Longest):
    def predict(self, asked: AdviceRequest, artefact: Any) -> float:
        asked.history["elapsed_s"] = 1e9
        return 1 / 0


class NoJson(Longest):
    def update(self, data: pd.DataFrame, previous: Any, config: Config, now_s: int) -> Any:
        return {"frame": data}


class BreaksLoad(Longest):
    def __init__(self) -> None:
        raise RuntimeError("no license")


class Entry:
    """As importlib.metadata's."""

    module = __name__

    def __init__(self, made: type) -> None:
        self.made = made

    def load(self) -> type:
        return self.made


CLASSES: dict[str, list[type]] = {
    "breaks_load": [BreaksLoad], "breaks_update": [BreaksUpdate], "no_json": [NoJson],
    "breaks_predict": [BreaksPredict], "longest": [Longest], "twice": [Longest, Longest], "memory": [Longest],
}  # fmt: skip


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the entry points that were looked up."""
    names: list[str] = []

    def entry_points(group: str, name: str) -> Iterator[Entry]:
        assert group == "almanac.services"
        names.append(name)
        return iter([Entry(made) for made in CLASSES.get(name, [])])

    monkeypatch.setattr(own_services, "entry_points", entry_points)
    return names


@pytest.fixture
def record(site_history: pd.DataFrame, tmp_path: Path) -> SiteRecord:
    return SiteRecord(Store.create(tmp_path / "store").of("lab"), site_history, NOW_S)


def naming(config: Config, *names: str) -> Config:
    return dataclasses.replace(config, services=parse_config({"services": {"extra": list(names)}}).services)


def test_a_second_training_of_the_same_record_changes_nothing(config: Config, record: SiteRecord) -> None:
    trained = train(record.history, config, NOW_S)
    again = train(record.history, config, NOW_S, trained)
    assert (again.model.texts, again.model.unseen) == (trained.model.texts, trained.model.unseen)
    request = JobRequest(user="user-1", job_name="job", gpu_count=4)
    assert advise(request, record.history, trained, config, NOW_S).services == {}


def test_nothing_is_loaded_that_the_site_does_not_name(
    config: Config, record: SiteRecord, asked_for: list[str]
) -> None:
    assert update_own(record, {"longest": Learned(1, {})}, config).learned == {}
    assert own_advice(AdviceRequest(JobRequest(user="ann"), record.history, config), {}) == {}
    assert asked_for == []


def test_what_a_service_does_wrong_costs_that_one_alone(config: Config, record: SiteRecord) -> None:
    config = naming(config, "breaks_load", "breaks_update", "no_json", "missing", "twice", "memory", "longest")
    history = record.history.copy()
    updated = update_own(record, {"breaks_update": Learned(5, {"ann": 1.0})}, config)
    assert updated.names == ("longest",)
    user = str(history["user"].iloc[0])
    assert updated.learned["longest"].artefact[user] == history[history["user"] == user]["elapsed_s"].max()
    assert updated.learned["breaks_update"] == Learned(5, {"ann": 1.0}), "what it had learned is kept"
    assert set(updated.learned) == {"longest", "breaks_update"}
    assert updated.faults["breaks_load"] == "failed to load: RuntimeError: no license"
    assert updated.faults["breaks_update"] == "failed to update: SystemExit: no such table"
    assert updated.faults["no_json"].startswith("failed to update: TypeError: ")
    assert "0 entry points" in updated.faults["missing"]
    assert "2 entry points" in updated.faults["twice"]
    assert "almanac's own services" in updated.faults["memory"]
    pd.testing.assert_frame_equal(record.history, history)


def test_a_service_learns_on_from_what_it_had_learned(config: Config, record: SiteRecord) -> None:
    user = str(record.history["user"].iloc[0])
    updated = update_own(record, {"longest": Learned(5, {user: 1e12})}, naming(config, "longest"))
    assert updated.learned["longest"].updated_s == NOW_S
    assert updated.learned["longest"].artefact[user] == 1e12


def test_a_service_that_cannot_predict_leaves_the_others_theirs(config: Config, record: SiteRecord) -> None:
    asked = AdviceRequest(
        JobRequest(user="ann", submit_s=NOW_S), record.history, naming(config, "breaks_predict", "longest")
    )
    history = record.history.copy()
    said = own_advice(asked, {"longest": Learned(7, {"ann": 3.0})})
    assert said == {
        "breaks_predict": {
            "updated_s": None,
            "told": None,
            "error": "failed to predict: ZeroDivisionError: division by zero",
        },
        "longest": {"updated_s": 7, "told": {"longest_s": 3.0}, "error": None},
    }
    pd.testing.assert_frame_equal(record.history, history)


def test_what_services_learned_goes_back_and_away_with_its_version(
    config: Config, history_of: History, tmp_path: Path
) -> None:
    trained = train(history_of([{}]), config, NOW_S)
    assert load_learned(tmp_path) == {}
    for number in range(3):
        save(
            dataclasses.replace(trained, trained_s=NOW_S + number), tmp_path, {"longest": Learned(number, {"ann": 1.5})}
        )
    assert load_learned(tmp_path) == {"longest": Learned(2, {"ann": 1.5})}
    roll_back(tmp_path)
    assert load_learned(tmp_path)["longest"].updated_s == 1
    prune(tmp_path, 2)
    assert len(list((tmp_path / "services").iterdir())) == 2
    save(trained, tmp_path)
    assert load_learned(tmp_path) == {}, "none was named"


def test_damaged_artefacts_of_services_are_named(config: Config, history_of: History, tmp_path: Path) -> None:
    version = save(train(history_of([{}]), config, NOW_S), tmp_path, {"longest": Learned(1, {})})
    meta = tmp_path / "services" / version / "meta.json"
    for text in ("{", meta.read_text().replace("updated_s", "updated")):
        meta.write_text(text)
        with pytest.raises(StoreError, match=r"meta\.json"):
            load_learned(tmp_path)


def test_load_own_takes_each_name_once(asked_for: list[str]) -> None:
    assert list(load_own(["longest", "longest"]).services) == ["longest"]
    assert asked_for == ["longest"]
