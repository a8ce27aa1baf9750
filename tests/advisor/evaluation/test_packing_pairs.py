"""Two bounds together exceed a GPU no more often than stated: on the site whose memory is hard to foresee."""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import pytest
from hostile_record import record_of
from hostile_site import proof_shape
from packed_pairs import replay_pairs

from almanac.config import AdviceSection, Tier

TIERS = (Tier("hbm40g", 40960, "A100-40", constraint="hbm40g"), Tier("hbm80g", 81920, "A100-80", constraint="hbm80g"))
CONTEXT_MIB = 500
WARM_UP_S = 30 * 86_400


@pytest.mark.parametrize("risk", [0.01, 0.05])
@pytest.mark.parametrize("is_hostile", [True, False])
def test_later_runs_of_advised_pairs_exceed_a_gpu_no_more_often_than_stated(risk: float, is_hostile: bool) -> None:
    shape = dataclasses.replace(proof_shape(502), days=60.0, users=60)
    history, truth = record_of(shape, is_hostile=is_hostile)
    advice = dataclasses.replace(AdviceSection(), risk=risk)
    pairs = pd.DataFrame(list(replay_pairs(history, advice, TIERS, CONTEXT_MIB, shape.start_s + WARM_UP_S)))
    need = truth["need_mib"].to_numpy()
    exceeds = pd.Series([need[first] + need[second] for first, second in pairs["rows"]]) > pairs["usable_mib"]
    for kind in (pairs["is_one_family"], ~pairs["is_one_family"]):
        number = int(kind.sum())
        assert number > 200
        allowance = 2 * math.sqrt(risk * (1 - risk) / number)
        assert exceeds[kind].mean() <= risk + allowance
