"""The rows of advice files: the decisions of `almanac advise`, for every family that users have run of late.

A family is asked about as its newest job was: F. For any other name with as many GPUs the user's newest job with so
many stands: G; for any job at all their newest one: U. For everybody else the site's newest jobs do, as a stranger's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from advisor.decisions.priority import decide_priority
from advisor.decisions.tier import CHOICE, RAN_OUT, decide_tier
from advisor.duration.overrun import TIMES, Overrun
from advisor.evaluation.recorded import recorded_requests
from advisor.explain import short_text, why_no_advice
from advisor.service import Trained, advise_many
from almanac.config import Config
from almanac.names import SCRIPT_PREFIX, is_family
from almanac.records import Advice, ExpectedWait, Request
from almanac.units import DAY_S, format_duration
from slurm_hooks.advice.file import FAMILY, GPUS, MAX_BYTES, USER, Row, RowKind, render_row
from slurm_hooks.advice.packing import packing_rows
from slurm_hooks.advice.packing_file import PackingRow

MAX_GPU_COUNTS = 100
SITE_JOBS = 100
"""Newest jobs of a GPU count whose median prediction stands for a stranger's."""


LEAST_ROW_BYTES = len(render_row(Row(FAMILY, 0, 0))) - 1
"""Of a family's line, beside its key and its GPU count."""


@dataclass
class UserRows:
    """A user's rows: families newest first, then GPU counts, then any job.

    cut: older families that no row was made for, because the file cannot hold one. packing: of the packing file.
    """

    rows: list[Row] = field(default_factory=list)
    cut: int = 0
    packing: list[PackingRow] = field(default_factory=list)


def user_rows(history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> dict[str, UserRows]:
    """By user their rows. Users without any are not there.

    history: all of these users' jobs, load_history(..., running=True).
    """
    since_s = now_s - config.advice.history_days * DAY_S
    recent = history[(history["submit_s"] >= since_s) & (history["submit_s"] < now_s)]
    newest = recent.sort_values(["submit_s", "job_id"], ascending=False)
    families = newest.drop_duplicates(["user", "name_key", "gpu_count"])
    families = families[[is_family(key) and not key.startswith(SCRIPT_PREFIX) for key in families["name_key"]]]
    fits = _could_fit(families)
    sizes = newest.drop_duplicates(["user", "gpu_count"])
    sizes = sizes[sizes.groupby("user").cumcount() < MAX_GPU_COUNTS]
    kinds, requests = list[RowKind](), list[Request]()
    chosen_rows: dict[RowKind, pd.DataFrame] = {
        FAMILY: families[fits], GPUS: sizes, USER: newest.drop_duplicates(["user"]),
    }  # fmt: skip
    for kind, chosen in chosen_rows.items():
        for request in recorded_requests(chosen, config.tiers):
            kinds.append(kind)
            # A row is looked up by name and GPU count alone, whatever the script.
            name = request.job_name if kind == FAMILY else ""
            rule = request.rule if kind == FAMILY else ""
            requests.append(dataclasses.replace(request, job_name=name, script_key="", rule=rule))
    cut = families.loc[~fits, "user"].value_counts().to_dict()
    rows: dict[str, UserRows] = {}
    for kind, advice in zip(kinds, advise_many(requests, history, trained, config, now_s), strict=True):
        row, user = row_of(kind, advice, config), advice.request.user
        if row is not None:
            rows.setdefault(user, UserRows(cut=cut.get(user, 0))).rows.append(row)
    for user, packing in packing_rows(history, trained, config, now_s).items():
        if user in rows:
            rows[user].packing = packing
    return rows


def _could_fit(families: pd.DataFrame) -> pd.Series[bool]:
    """Which of the families, each user's newest first, fit into a file if all rows are as short as a row can be."""
    row_bytes = LEAST_ROW_BYTES + families["name_key"].str.len() + families["gpu_count"].astype(str).str.len()
    return row_bytes.groupby(families["user"]).cumsum() <= MAX_BYTES


def site_rows(newest: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> list[Row]:
    """Rows for users of whom nothing is known; none where nothing was trained.

    newest: the newest SITE_JOBS jobs of each GPU count.
    """
    counts = sorted(newest["gpu_count"].unique().tolist())[:MAX_GPU_COUNTS]
    requests = [
        dataclasses.replace(request, user="", account="", job_name="", script_key="", rule="")
        for request in recorded_requests(newest[newest["gpu_count"].isin(counts)], config.tiers)
    ]
    said = [each for each in advise_many(requests, newest.head(0), trained, config, now_s) if each.priority]
    groups: list[tuple[RowKind, list[Advice]]]
    groups = [(GPUS, [each for each in said if each.request.gpu_count == count]) for count in counts]
    groups.append((USER, said))
    rows = [row_of(kind, _median(group), config) for kind, group in groups if group]
    return [row for row in rows if row is not None]


def _median(advices: Sequence[Advice]) -> Advice:
    """The advice whose time per GPU is in the middle (the lower of two)."""
    by_time = {_counted_s(each): each for each in advices}
    return by_time[statistics.median_low(map(_counted_s, advices))]


def _counted_s(advice: Advice) -> float:
    """The time per GPU that counts for the site factor, seconds."""
    return advice.priority.rank_gpu_time_s / advice.request.gpu_count if advice.priority else 0.0


def row_of(kind: RowKind, advice: Advice, config: Config) -> Row | None:
    """None where nothing is predicted: then there is nothing to go by."""
    priority, duration, gpus = advice.priority, advice.duration, advice.request.gpu_count
    if priority is None or duration is None:
        return None
    if kind == USER:
        return Row(USER, max(round(_counted_s(advice)), 1), _extra(advice, config))
    predicted_s = max(round(duration.duration_s), 1)
    if kind == GPUS:
        return Row(GPUS, predicted_s, priority.site_factor, gpus=gpus)
    text = short_text(advice)
    tier = holding_tier(advice, config)
    return Row(
        FAMILY,
        predicted_s,
        priority.site_factor,
        advice.request.name_key,
        gpus,
        _stated_mib(advice),
        tier,
        published_waits(advice.waits, tier),
        text,
        "" if text else why_no_advice(advice),
    )


def published_waits(waits: Sequence[ExpectedWait], tier: str | None) -> str:
    """ "hbm80g=3 h 10 min;hbm40g=12 min": waits of this tier and of those that differ enough from it; else ""."""
    own = next((wait for wait in waits if wait.tier == tier), None)
    others = [wait for wait in waits if own and wait.differs_from(own)]
    shown = [wait for wait in waits if wait is own or wait in others] if others else []
    return ";".join(f"{wait.tier}={format_duration(wait.median_s)}" for wait in shown)


def _extra(advice: Advice, config: Config) -> int:
    """Points that options add to the site factor of each job of the user, without those for short jobs."""
    longest_s = config.priority.max_gpu_time_s
    return decide_priority(longest_s, longest_s, Overrun(1.0, TIMES), advice.request.user, (), config.priority).extra


def _stated_mib(advice: Advice) -> int | None:
    stated_mib = advice.bound.bound_mib if advice.bound else None
    return None if stated_mib is None else round(stated_mib)


def holding_tier(advice: Advice, config: Config) -> str | None:
    """The tier to ask for; None without one, and where the request leaves a choice and no bound is stated."""
    if advice.bound is None or advice.tier.reason == RAN_OUT:
        return None
    if advice.tier.reason != CHOICE:
        return advice.tier.tier
    if advice.bound.bound_mib is None:
        return None
    plain = dataclasses.replace(advice.request, constraints="", gres="", gpu_type="", partition="")
    # The text of a request that leaves a choice names the bound, so the tier must hold that.
    bound = dataclasses.replace(advice.bound, tier_mib=max(advice.bound.bound_mib, advice.bound.tier_mib))
    return decide_tier(plain, bound, config.tiers, config.advice.headroom_mib).tier
