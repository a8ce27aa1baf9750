"""The rows of advice files: the decisions of `almanac advise`, for every family that users have run of late.

A family is asked about as its newest job was: F. For any other name with as many GPUs the user's newest job with so
many stands: G; for any job at all their newest one: U. For everybody else the site's newest jobs do, as a stranger's.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import pandas as pd

from advisor.duration.replay import recorded_requests
from advisor.explain import short_text, why_no_advice
from advisor.memory.tier import CHOICE, RAN_OUT, decide_tier
from advisor.packing.decide import PackingAdvice, packing_alone
from advisor.packing.evidence import packing_families, rules_of
from advisor.packing.text import packing_command, packing_sentence, packing_time
from advisor.service import Trained, advise_many
from almanac.config import Config
from almanac.names import SCRIPT_PREFIX, is_family
from almanac.records import Advice, JobRequest, WaitGain
from almanac.units import DAY_S, format_duration
from slurm_hooks.advice.file import FAMILY, GPUS, USER, AdviceRow, RowKind
from slurm_hooks.advice.kinds import PackingRow
from slurm_hooks.advice.sched import MAX_BYTES, row_line
from telemetry.history import UserHistories

SHARED_GPUS = 1
"""GPUs of a task of almanac-pack, which sees one GPU."""


def packing_rows(
    history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> dict[str, list[PackingRow]]:
    """Return the rows of each user's packing file, the newest family first. Users without any are left out.

    history: all of these users' jobs, load_history(..., running=True).
    """
    if trained is None or not config.packing.advise:
        return {}
    rules, found = rules_of(config), defaultdict(list)
    small = history[history["gpu_count"] == SHARED_GPUS]
    families = packing_families(small, trained.calibration, config, now_s)
    for family in sorted(families, key=lambda each: (-each.newest_s, each.key)):
        advice = packing_alone(family, rules)
        if advice.is_advised:
            found[family.user].append(_row(advice))
    return dict(found)


def _row(advice: PackingAdvice) -> PackingRow:
    family = advice.members[0]
    need_mib = math.ceil((advice.needed_mib or 0.0) + advice.rules.headroom_mib)
    text = f"{packing_sentence(advice)} {packing_time(advice)} Use: {packing_command(advice)}"
    return PackingRow(family.name_key, family.gpu_count, need_mib, text)


MAX_GPU_COUNTS = 100
SITE_JOBS = 100
"""Newest jobs of a GPU count whose median prediction stands for a stranger's."""


LEAST_ROW_BYTES = len(row_line(AdviceRow(FAMILY, 0, 0))) - 1
"""Bytes of a family's line, without its key and its GPU count."""


@dataclass
class UserRows:
    """A user's rows: families newest first, then GPU counts, then any job.

    cut: older families that no row was made for, because the file cannot hold one. packing: of the packing file.
    """

    rows: list[AdviceRow] = field(default_factory=list)
    cut: int = 0
    packing: list[PackingRow] = field(default_factory=list)


def user_rows(history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> dict[str, UserRows]:
    """Return the rows of each user's advice file. Users without any are left out.

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
    kinds, requests = list[RowKind](), list[JobRequest]()
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
    """Mark the families, each user's newest first, that fit into a file if all rows are as short as a row can be."""
    row_bytes = LEAST_ROW_BYTES + families["name_key"].str.len() + families["gpu_count"].astype(str).str.len()
    return row_bytes.groupby(families["user"]).cumsum() <= MAX_BYTES


def site_rows(newest: pd.DataFrame, trained: Trained | None, config: Config, now_s: int) -> list[AdviceRow]:
    """Rows for users without history; none before the first training.

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


def row_of(kind: RowKind, advice: Advice, config: Config) -> AdviceRow | None:
    """The row of an advice; None without a prediction."""
    priority, duration, gpus = advice.priority, advice.duration, advice.request.gpu_count
    if priority is None or duration is None:
        return None
    if kind == USER:
        return AdviceRow(USER, max(round(_counted_s(advice)), 1), 0)
    predicted_s = max(round(duration.duration_s), 1)
    if kind == GPUS:
        return AdviceRow(GPUS, predicted_s, priority.site_factor, gpus=gpus)
    text = short_text(advice)
    tier = holding_tier(advice, config)
    return AdviceRow(
        FAMILY,
        predicted_s,
        priority.site_factor,
        advice.request.name_key,
        gpus,
        _stated_mib(advice),
        tier,
        published_gains(advice.gains if tier == advice.tier.tier else ()),
        text,
        "" if text else why_no_advice(advice),
        pilot=advice.tier.pilot if tier else None,
    )


def published_gains(gains: Sequence[WaitGain]) -> str:
    """ "hbm80g=40 min;hbm40g=2 h": by tier asked for, how much earlier jobs start in the row's tier."""
    return ";".join(f"{gain.asked}={format_duration(gain.gain_s)}" for gain in gains)


def _stated_mib(advice: Advice) -> int | None:
    stated_mib = advice.bound.bound_mib if advice.bound else None
    return None if stated_mib is None else round(stated_mib)


def holding_tier(advice: Advice, config: Config) -> str | None:
    """The tier to ask for; None without one, while none of many open jobs has shown its memory, and where the request
    leaves a choice and no bound is stated."""
    is_held = advice.tier.pilot is not None and advice.tier.pilot <= 0
    if advice.bound is None or advice.tier.reason == RAN_OUT or is_held:
        return None
    if advice.tier.reason != CHOICE:
        return advice.tier.tier
    if advice.bound.bound_mib is None:
        return None
    plain = dataclasses.replace(advice.request, constraints="", gres="", gpu_type="", partition="")
    # The text of a request that leaves a choice names the bound, so the tier must hold that.
    bound = dataclasses.replace(advice.bound, tier_mib=max(advice.bound.bound_mib, advice.bound.tier_mib))
    return decide_tier(plain, bound, config.tiers, config.advice.headroom_mib).tier


CHUNK = 100
"""Users looked at together: enough for LightGBM to be asked seldom, few enough to be held in memory."""
CHUNKS_READ = 4
"""Chunks that are read at once: each reading looks at all rows."""
MIN_USERS = 400
"""Users below which starting processes (1 to 2 s each) costs more than it saves."""

_task: tuple[Trained | None, Config, int]


def rows_by_user(
    histories: UserHistories, users: Sequence[str], trained: Trained | None, config: Config, now_s: int, processes: int
) -> Iterator[dict[str, UserRows]]:
    """Yield `user_rows` for one group of users after another."""
    chunks = _histories(histories, users)
    if processes < 2 or len(users) < MIN_USERS:
        for history in chunks:
            yield user_rows(history, trained, config, now_s)
        return
    # Not forked: DuckDB and Arrow have threads, whose locks a forked child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (trained, config, now_s)) as pool:
        waiting: list[Future[dict[str, UserRows]]] = []
        for history in chunks:
            if len(waiting) > processes:
                yield waiting.pop(0).result()
            waiting.append(pool.submit(_rows, history))
        for future in waiting:
            yield future.result()


def _histories(histories: UserHistories, users: Sequence[str]) -> Iterator[pd.DataFrame]:
    """The history of CHUNK users after another."""
    many = CHUNK * CHUNKS_READ
    for start in range(0, len(users), many):
        some = users[start : start + many]
        history = histories.of(some)
        for first in range(0, len(some), CHUNK):
            yield history[history["user"].isin(some[first : first + CHUNK])].reset_index(drop=True)


def _start(trained: Trained | None, config: Config, now_s: int) -> None:
    global _task
    _task = (trained, config, now_s)
    # Millions of small objects that all live until the chunk is done: looking for garbage among them is a third of
    # the time.
    gc.disable()


def _rows(history: pd.DataFrame) -> dict[str, UserRows]:
    rows = user_rows(history, *_task)
    gc.collect()
    return rows
