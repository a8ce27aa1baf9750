"""Learn from a site's history and advise submissions: durations, memory, waits, and a site's own services.

A site's own services are entry points of the group `almanac.services`. They are loaded only if services.extra names
them. A service that fails is reported, and costs its own advice alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

import pandas as pd

from advisor.duration.features import AdviceRequest, submitted_by
from advisor.duration.rank import ChooseRank
from advisor.duration.service import LearnedDurations, advise_durations, learn_durations
from advisor.host.options import learn_host
from advisor.memory.calibration import Calibration
from advisor.memory.decide import MemoryAdvice, calibrate, decide_memory
from advisor.memory.peak_store import remember_peaks
from advisor.waits.record import WaitGains, learn_gains
from almanac.config import Config
from almanac.files import load_trusted
from almanac.hardware import NEAR
from almanac.records import Advice, JobRequest
from almanac.tiers import real_capacities
from telemetry.store.store import ClusterStore


@dataclass(frozen=True)
class Trained(LearnedDurations):
    """The models learned from a site's jobs at trained_s. host: by resource, as learn_host gives them."""

    trained_s: int
    calibration: Calibration
    waits: WaitGains = field(default_factory=WaitGains)
    host: Mapping[str, Calibration] = field(default_factory=dict)


def train(
    history: pd.DataFrame,
    config: Config,
    now_s: int,
    previous: Trained | None = None,
    choose_rank: ChooseRank | None = None,
    host: pd.DataFrame | None = None,
) -> Trained:
    """Learn from load_history(..., running=True). previous: the version in use. host: load_host_history.

    Only jobs that ended before now_s count, and the jobs that ran then. Few or no jobs give as much as can be learned.
    """
    return Trained(
        **vars(learn_durations(history, previous, config, now_s, choose_rank)),
        trained_s=now_s,
        calibration=calibrate(submitted_by(history, now_s, config.advice.history_days), config.advice, config.tiers),
        waits=learn_gains(history, now_s),
        host={} if host is None else learn_host(host, config.advice, now_s),
    )


def advise(request: JobRequest, history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> Advice:
    """The advice for a submission at now_s. Pure.

    history: the user's jobs, also running ones. Rows of other users, and rows after now_s, do not count.
    """
    return advise_many([request], history, trained, config, now_s)[0]


def advise_many(
    requests: Sequence[JobRequest], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> list[Advice]:
    """Return the advice for many submissions at now_s, of any users, each as if it were the only one.

    history: all of these users' jobs.
    """
    if not requests:
        return []
    asked = [AdviceRequest(dataclasses.replace(request, submit_s=now_s), history, config) for request in requests]
    durations = advise_durations(asked, trained)
    memories = advise_memory(asked, trained.calibration if trained else None)
    gains, names = trained.waits if trained else WaitGains(), [tier.name for tier in config.tiers]
    return [
        Advice(
            request=each.request,
            tier=memory.tier,
            bound=memory.bound,
            duration=duration,
            priority=priority,
            excluded=excluded,
            evidence=memory.evidence,
            gains=gains.of(names, memory.tier.tier, each.request.gpu_count),
        )
        for each, (duration, priority), (memory, excluded) in zip(asked, durations, memories, strict=True)
    ]


def advise_memory(
    asked: Sequence[AdviceRequest], calibration: Calibration | None
) -> list[tuple[MemoryAdvice, Mapping[str, int]]]:
    """Advise the memory, and count the runs without evidence by reason.

    In the order of `asked`, which all have the same history, settings, and submit_s. Pure.
    """
    now_s = asked[0].request.submit_s
    users = {each.job.user for each in asked}
    known = submitted_by(asked[0].history, now_s, asked[0].config.advice.history_days)
    config = _with_capacities(asked[0].config, known)
    peaks = remember_peaks(users, known, now_s, config.advice, config.tiers)
    evidences = [peaks.evidence(each.job, now_s) for each in asked]
    return [
        (decide_memory(each.request, evidence, calibration, config), dict(evidence.excluded))
        for each, evidence in zip(asked, evidences, strict=True)
    ]


def _with_capacities(config: Config, history: pd.DataFrame) -> Config:
    """Tiers with the least capacity that telemetry has measured on their GPUs, where that is below the configured one.

    A driver can give a profile less memory than another one does, and ECC takes some of a whole GPU: no name says it.
    """
    slices = {tier.gres for tier in config.tiers if tier.is_slice and tier.gres}
    if not {"gpu_type", "hbm_capacity_mib"} <= set(history.columns):
        return config
    known = history[history["hbm_capacity_mib"] > 0]
    of_slices = known[known["gpu_type"].isin(slices)].groupby("gpu_type")["hbm_capacity_mib"].min()
    sizes = known[["tier", "hbm_capacity_mib"]].drop_duplicates()
    least = {str(gres): float(mib) for gres, mib in of_slices.items()}
    for tier in config.tiers:
        own = sizes.loc[sizes["tier"] == tier.name, "hbm_capacity_mib"]
        own = own[own >= (1 - NEAR) * tier.capacity_mib]
        if not tier.is_slice and len(own):
            least[tier.name] = float(own.min())
    return dataclasses.replace(config, tiers=real_capacities(config.tiers, least))


BUILT_IN = ("gpu_time", "memory", "wait")
"""Names of almanac's own services. A site's services have other names."""
GROUP = "almanac.services"
Data = TypeVar("Data")
Artefact = TypeVar("Artefact")
Predicted = TypeVar("Predicted")


@dataclass(frozen=True)
class SiteRecord:
    """A site's record at now_s: its store, and the jobs in it, read once for all services.

    history: load_history(..., running=True). More is in `store.read(table, ...)`.
    """

    store: ClusterStore
    history: pd.DataFrame
    now_s: int


@dataclass(frozen=True)
class Learned:
    """The state that a site's own service learned at updated_s: plain JSON values."""

    updated_s: int
    artefact: Any


class AdviceService(Protocol[Data, Artefact, Predicted]):
    """Learns one thing of a site, and predicts it for a submission."""

    def fetch(self, record: SiteRecord) -> Data:
        """Return the data that update learns from."""

    def update(self, data: Data, previous: Artefact | None, config: Config, now_s: int) -> Artefact:
        """Learn at now_s. previous: the result of the last time; None if there was none."""

    def predict(self, asked: AdviceRequest, artefact: Artefact | None) -> Predicted:
        """Predict for a submission. Pure. artefact: None if nothing was learned yet."""

    def advise(self, asked: AdviceRequest, predicted: Predicted) -> Mapping[str, Any]:
        """The advice: fields of `Advice`, or for a site's own service plain JSON values. Pure.

        The hooks that change Slurm read these values. A service never changes Slurm itself.
        """


@dataclass(frozen=True)
class Own:
    """The services that could be loaded, and by name why others could not."""

    services: Mapping[str, AdviceService[Any, Any, Any]]
    faults: Mapping[str, str]


@dataclass(frozen=True)
class Updated:
    """Outcome of an update of the site's own services.

    names: the services that were updated. learned: by service, what it has learned now, or had learned before if its
    update failed. faults: why an update failed, by service.
    """

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


def update_own(record: SiteRecord, previous: Mapping[str, Learned], config: Config) -> Updated:
    """Each service that services.extra names learns from a copy of the history."""
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
    """Return the advice of the site's own services, by name: updated_s, told, and error.

    updated_s is None before the first update; error is None if the service did its work.
    """
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
    """The value as JSON gives it back. Raises TypeError or ValueError for other values."""
    return json.loads(json.dumps(value, allow_nan=False))


def _said(step: str, error: BaseException) -> str:
    return f"failed to {step}: {type(error).__name__}: {error}"
