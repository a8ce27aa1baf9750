"""Families of names by similarity: incremental, stable, and one user's at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from advisor.duration.families import NameFamilies
from advisor.duration.features import submissions
from advisor.evaluation.replay import observed_history, replay_durations
from almanac.config import Rolling

NAMES = st.lists(st.text("abc-#", max_size=8), max_size=30)


def test_a_new_name_joins_the_founder_most_like_it() -> None:
    families = NameFamilies(0.75)
    assert families.join("ann", "train-bert-#") == "train-bert-#"
    assert families.join("ann", "train-bart-#") == "train-bert-#"
    assert families.join("ann", "evaluate") == "evaluate"
    assert families.find("bob", "train-bart-#") == "train-bart-#", "another user's names are not looked at"


@given(NAMES, NAMES)
def test_a_name_keeps_its_family_whatever_comes_later(first: list[str], later: list[str]) -> None:
    families = NameFamilies(0.6)
    before = {name: families.join("ann", name) for name in first}
    for name in later:
        families.join("ann", name)
    assert {name: families.find("ann", name) for name in first} == before
    assert all(families.join("ann", family) == family for family in before.values()), "founders stay in their own"


@given(NAMES, st.text("abc-#", max_size=8))
def test_asking_changes_nothing_and_tells_what_joining_would_give(names: list[str], asked: str) -> None:
    families = NameFamilies(0.6)
    for name in names:
        families.join("ann", name)
    assert families.find("ann", asked) == families.find("ann", asked) == families.join("ann", asked)


def test_live_and_replay_agree_on_clusters_too(site_history: pd.DataFrame) -> None:
    config = dataclasses.replace(Rolling(), families="levenshtein", similarity=0.7)
    replay = replay_durations(site_history, config)
    mask = replay_durations(site_history, Rolling())
    assert not np.array_equal(replay.features.numbers, mask.features.numbers, equal_nan=True)
    for row in range(200, len(site_history), 197):
        job = submissions(site_history)[row]
        known = observed_history([job.user], site_history, job.submit_s, config, None).known_at_submit(job)
        assert np.array_equal(np.array(known.features), replay.features.numbers[row], equal_nan=True)
