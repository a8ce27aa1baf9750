"""Scores of predictors as tables: for people, and as plain values for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from almanac.units import format_count
from cli.output import show_table

if TYPE_CHECKING:
    from advisor.evaluation.scores import Scores

_NUMBERS = {
    "spearman": "Spearman",
    "gpu_time_spearman": "of GPU-time",
    "median_abs_log_error": "median |log error|",
    "share_within_2x": "within 2x",
}


def scores_table(scores: Mapping[str, Scores]) -> dict[str, dict[str, float | None]]:
    """NaN is not JSON: null stands for it."""
    return {
        name: {key: None if math.isnan(value) else value for key, value in dataclasses.asdict(each).items()}
        for name, each in scores.items()
    }


def show_scores(title: str, scores: Mapping[str, Scores], ours: tuple[str, ...], counted: str = "jobs") -> None:
    """Print a table, with `ours` first; nothing if there are no scores."""
    rows = []
    for name in sorted(scores, key=lambda name: (ours.index(name) if name in ours else len(ours), name)):
        numbers = [getattr(scores[name], key) for key in _NUMBERS]
        cells = ["-" if math.isnan(number) else f"{number:.3f}" for number in numbers]
        rows.append([name, format_count(scores[name].jobs), *cells])
    columns = [title, counted, *_NUMBERS.values()]
    if rows:
        show_table(columns, rows, right=columns[1:])
