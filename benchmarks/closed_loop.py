"""Users who follow the advice: the record that a site has where its own advice changes what runs where."""

from __future__ import annotations

import numpy as np
import pandas as pd
from hostile_record import evidence_columns
from hostile_site import hostile_profile

from advisor.evaluation.tier import DOWN, replay_tiers
from almanac.config import Config

ROUND_DAYS = 20
DIES_AFTER_S = 600
SMALLER, CONSTRAINT, CAPACITY_MIB, MOST_FRAC = "hbm40g", "gpu&hbm40g", 40960.0, 0.985
_SECOND_ID = 10**8


def followed(
    history: pd.DataFrame, truth: pd.DataFrame, config: Config, since_s: int, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """history and truth, where followers asked for the smaller tier from since_s on whenever they were advised to.

    A job that needs more than the smaller tier holds dies there, and is submitted again as it was. Each ROUND_DAYS are
    advised by the record that the rounds before have made. Resubmissions are not advised: their user knows better.
    """
    rng = np.random.default_rng([seed, 23])
    users = sorted(history["user"].unique())
    followers = {user for user in users if rng.random() < hostile_profile()["followers"]["share"]}
    end_s = int(history["submit_s"].max()) + 1
    for begin_s in range(since_s, end_s, ROUND_DAYS * 86_400):
        rows = replay_tiers(history[history["submit_s"] < begin_s + ROUND_DAYS * 86_400].reset_index(drop=True), config)
        is_moved = rows["move"].eq(DOWN) & rows["user"].isin(followers) & rows["submit_s"].ge(begin_s)
        moved = np.flatnonzero(history["submit_s"] < begin_s + ROUND_DAYS * 86_400)[rows["row"][is_moved]]
        moved = moved[history["job_id"].to_numpy()[moved] < _SECOND_ID]
        history, truth = _move(history, truth, moved)
    return history, truth


def _move(history: pd.DataFrame, truth: pd.DataFrame, moved: np.ndarray) -> tuple[pd.DataFrame, pd.DataFrame]:
    is_moved = np.zeros(len(history), dtype=bool)
    is_moved[moved] = True
    # What asked for 80 GB and ran there keeps its record as it was, for those that die on 40 GB and come again.
    is_death = is_moved & (truth["need_mib"] > CAPACITY_MIB).to_numpy()
    again, again_truth = history[is_death].copy(), truth[is_death]
    shown = np.minimum(history["hbm_max_mib"], MOST_FRAC * CAPACITY_MIB)
    reserved = history["hbm_max_mib"] * CAPACITY_MIB / history["hbm_capacity_mib"]
    is_reserving = (truth["kind"] == "reserved").to_numpy()
    elapsed_s = history["elapsed_s"].where(~is_death, np.minimum(history["elapsed_s"], DIES_AFTER_S))
    changed = history.assign(
        tier=history["tier"].where(~is_moved, SMALLER),
        constraints=history["constraints"].where(~is_moved, CONSTRAINT),
        hbm_max_mib=history["hbm_max_mib"].where(~is_moved, np.where(is_reserving, reserved, shown)),
        hbm_capacity_mib=history["hbm_capacity_mib"].where(~is_moved, CAPACITY_MIB),
        state=history["state"].where(~is_death, "FAILED"),
        elapsed_s=elapsed_s,
        end_s=history["end_s"].where(~is_death, history["start_s"] + elapsed_s).astype("int64"),
    )
    shift_s = changed["end_s"][is_death] + 60 - again["submit_s"]
    again = again.assign(**{name: again[name] + shift_s for name in ("submit_s", "start_s", "end_s")})
    again = again.assign(job_id=again["job_id"] + _SECOND_ID, is_array=False)
    truth = truth.assign(is_death=truth["is_death"] | is_death)
    whole = pd.concat([changed, again.astype(changed.dtypes.to_dict())], ignore_index=True)
    whole = whole.assign(**evidence_columns(whole))
    order = np.lexsort((whole["submit_s"], whole["job_id"], whole["end_s"]))
    facts = pd.concat([truth, again_truth], ignore_index=True)
    return whole.iloc[order].reset_index(drop=True), facts.iloc[order].reset_index(drop=True)
