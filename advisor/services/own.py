"""A site's own services: entry points of the group `almanac.services`, loaded only where services.extra names them.

Whatever one of them does wrong is said, and costs that service alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from advisor.service import BUILT_IN
from advisor.services.base import AdviceRequest, AdviceService, Learned, Record
from almanac.config import Config
from almanac.trusted_file import load_trusted

GROUP = "almanac.services"


@dataclass(frozen=True)
class Own:
    """The services that could be loaded, and by name why others could not."""

    services: Mapping[str, AdviceService[Any, Any, Any]]
    faults: Mapping[str, str]


@dataclass(frozen=True)
class Updated:
    """names: the services that were updated. learned: of the others what they had learned before; faults: why."""

    names: tuple[str, ...]
    learned: Mapping[str, Learned]
    faults: Mapping[str, str]


def load_own(names: Sequence[str]) -> Own:
    services, faults = {}, {}
    for name in dict.fromkeys(names):
        try:
            services[name] = _load(name)
        except (Exception, SystemExit) as error:
            faults[name] = _said("load", error)
    return Own(services, faults)


def _load(name: str) -> AdviceService[Any, Any, Any]:
    if name in BUILT_IN:
        raise LookupError("one of almanac's own services has that name")
    found = list(entry_points(group=GROUP, name=name))
    if len(found) != 1:
        raise LookupError(f"{len(found)} entry points of the group {GROUP} have that name, expected 1")
    service: AdviceService[Any, Any, Any] = load_trusted(found[0])()
    return service


def update_own(record: Record, previous: Mapping[str, Learned], config: Config) -> Updated:
    """Each service that services.extra names learns from a copy of the history; nothing is loaded where it is empty."""
    own = load_own(config.services.extra)
    learned = {name: previous[name] for name in config.services.extra if name in previous}
    names, faults = [], dict(own.faults)
    for name, service in own.services.items():
        try:
            before = _plain(learned[name].artefact) if name in learned else None
            data = service.fetch(dataclasses.replace(record, history=record.history.copy()))
            artefact = _plain(service.update(data, before, config, record.now_s))
        except (Exception, SystemExit) as error:
            faults[name] = _said("update", error)
        else:
            names.append(name)
            learned[name] = Learned(record.now_s, artefact)
    return Updated(tuple(names), learned, faults)


def own_advice(asked: AdviceRequest, learned: Mapping[str, Learned]) -> dict[str, dict[str, Any]]:
    """By name: updated_s (None before the first update), told, and error (None where it did its work)."""
    own = load_own(asked.config.services.extra)
    said: dict[str, dict[str, Any]] = {
        name: {"updated_s": None, "told": None, "error": fault} for name, fault in own.faults.items()
    }
    for name, service in own.services.items():
        known, told, fault = learned.get(name), None, None
        alone = dataclasses.replace(asked, history=asked.history.copy())
        try:
            told = _plain(dict(service.advise(alone, service.predict(alone, known.artefact if known else None))))
        except (Exception, SystemExit) as error:
            fault = _said("predict", error)
        said[name] = {"updated_s": known.updated_s if known else None, "told": told, "error": fault}
    return said


def _plain(value: Any) -> Any:
    """The value as JSON gives it back. Raises TypeError or ValueError where it is no JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


def _said(step: str, error: BaseException) -> str:
    return f"failed to {step}: {type(error).__name__}: {error}"
