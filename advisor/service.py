"""Learn from a site's history, and advise submissions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from advisor.duration.rank_scale import ChooseExponent, default_exponent
from advisor.duration.waits import WaitQuartiles
from advisor.memory.calibration import Calibration
from advisor.services.base import AdviceRequest
from advisor.services.gpu_time import LearnedDurations, advise_durations, learn_durations
from advisor.services.memory import advise_memory, learn_memory
from advisor.services.wait import expected_waits, learn_site_waits
from advisor.speed.learning import SpeedTable
from advisor.speed.site import learn_site_speeds
from almanac.config import Config
from almanac.records import Advice, Request

BUILT_IN = ("gpu_time", "memory", "wait")
"""Names of almanac's own services. A site's services have other names."""


@dataclass(frozen=True)
class Trained(LearnedDurations):
    """What almanac learned from a site's jobs at trained_s."""

    trained_s: int
    calibration: Calibration
    waits: WaitQuartiles = field(default_factory=WaitQuartiles)
    speeds: SpeedTable = field(default_factory=SpeedTable)


def train(
    history: pd.DataFrame,
    config: Config,
    now_s: int,
    previous: Trained | None = None,
    choose_exponent: ChooseExponent = default_exponent,
    speed_runs: pd.DataFrame | None = None,
) -> Trained:
    """Learn from load_history(..., running=True). previous: the version in use. speed_runs: load_speed_runs(...),
    to learn speeds of GPU types.

    Only jobs that ended before now_s count, and the jobs that ran then. Few or no jobs give as much as can be learned.
    """
    return Trained(
        **vars(learn_durations(history, previous, config, now_s, choose_exponent)),
        trained_s=now_s,
        calibration=learn_memory(history, config, now_s),
        waits=learn_site_waits(history, now_s),
        speeds=SpeedTable() if speed_runs is None else learn_site_speeds(speed_runs, config, now_s),
    )


def advise(request: Request, history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> Advice:
    """The advice for a submission at now_s. Pure.

    history: the user's jobs, also running ones. Rows of other users, and rows after now_s, do not count.
    """
    return advise_many([request], history, trained, config, now_s)[0]


def advise_many(
    requests: Sequence[Request], history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> list[Advice]:
    """The same for many submissions at now_s, of any users: each as if it were the only one.

    history: all of these users' jobs.
    """
    if not requests:
        return []
    asked = [AdviceRequest(dataclasses.replace(request, submit_s=now_s), history, config) for request in requests]
    durations = advise_durations(asked, trained)
    memories = advise_memory(asked, trained.calibration if trained else None)
    waits = expected_waits(asked, trained.waits if trained else None)
    return [
        Advice(
            request=each.request,
            tier=memory.advice.tier,
            bound=memory.advice.bound,
            duration=time.duration,
            priority=time.priority,
            excluded=memory.excluded,
            evidence=memory.advice.evidence,
            waits=wait,
        )
        for each, time, memory, wait in zip(asked, durations, memories, waits, strict=True)
    ]
