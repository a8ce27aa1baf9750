"""The rules of the watch: each finding when its condition has held, and none when the counters are silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from advisor.watch.decide import RULES, WatchState, decide
from advisor.watch.round import GPU_COUNTERS, GPUS, JOBS, Round, WatchFinding, comment_words

T0, STEP_S = 1_795_464_000, 120
JOB: dict[str, Any] = {
    "job_id": 1, "submit_s": T0 - 9000, "restarts": 0, "user": "ann", "account": "a", "partition": "gpu", "name": "n",
    "node_count": 1, "gpu_count": 2, "start_s": T0 - 8000, "limit_end_s": T0 + 90_000, "is_interactive": False,
    "is_shared": False, "is_serving": False, "comment": "",
}  # fmt: skip
IDLE = {"gpu_util_pct": 0.0, "gr_engine_active_frac": 0.0, "sm_active_frac": 0.0, "dram_active_frac": 0.0}
BUSY = {"gpu_util_pct": 97.0, "gr_engine_active_frac": 0.9, "sm_active_frac": 0.7, "tensor_active_frac": 0.3,
        "dram_active_frac": 0.4}  # fmt: skip
WAITS = {"gpu_util_pct": 100.0, "gr_engine_active_frac": 1.0, "sm_active_frac": 0.15, "tensor_active_frac": 0.0,
         "dram_active_frac": 0.0, "fp32_active_frac": 0.02, "nvlink_bytes_s": 0.0}  # fmt: skip
UNKNOWN = dict.fromkeys(GPU_COUNTERS, float("nan"))
Gpu = Mapping[str, float] | None


def a_round(number: int, gpus: Iterable[Gpu] = (), job: Mapping[str, Any] = JOB, **more: Any) -> Round:
    """The round STEP_S * number after T0, of one job. None: a GPU without samples."""
    rows = [
        {"job": 0, "host": "n1", "gpu": str(index), "sample_count": 4.0, **UNKNOWN, **gpu}
        for index, gpu in enumerate(gpus) if gpu is not None
    ]  # fmt: skip
    tables = pa.Table.from_pylist([dict(job)], JOBS), pa.Table.from_pylist(rows, GPUS)
    return Round(T0 + number * STEP_S, STEP_S, *tables, **more)


def played(rounds: Iterable[Round], state: WatchState | None = None) -> list[list[WatchFinding]]:
    """The findings of each round. The state goes through JSON between two rounds, as in its file."""
    found = []
    for each in rounds:
        state, findings = decide(state, each)
        state = msgspec.json.decode(msgspec.json.encode(state), type=WatchState)
        found.append(findings)
    return found


def kinds(findings: Iterable[WatchFinding]) -> list[str]:
    return [each.kind for each in findings]


def test_idle_job_is_found_when_the_time_is_over_and_not_before() -> None:
    found = played(a_round(number, [IDLE, IDLE]) for number in range(16))
    assert [kinds(each) for each in found] == [[]] * 14 + [["idle"]] * 2
    last = found[-1][0]
    assert (last.since_s, last.until_s, last.coverage) == (T0 - STEP_S, T0 + 15 * STEP_S, 1.0)
    assert last.says.startswith("if it waits for nothing, end it: scancel 1. all 2 GPUs idle for 32 min")


@pytest.mark.parametrize(
    "second", [BUSY, {**IDLE, "gpu_util_pct": 3.0}, {**IDLE, "tensor_active_frac": 0.05}, None, {}]
)
def test_job_is_not_idle_unless_all_its_gpus_are_seen_to_rest(second: Gpu) -> None:
    found = played(a_round(number, [IDLE, second]) for number in range(30))
    assert not any("idle" in kinds(each) for each in found)


def test_profiling_counters_alone_show_no_idle_gpu() -> None:
    only = {"sm_active_frac": 0.0, "tensor_active_frac": 0.0, "dram_active_frac": 0.0}
    assert not any(played(a_round(number, [only, only]) for number in range(30)))


@pytest.mark.parametrize(("hole", "is_found"), [(3, True), (6, False)])
def test_hole_beyond_the_silence_begins_the_idle_time_again(hole: int, is_found: bool) -> None:
    rounds = [a_round(n, [None, None] if 5 <= n < 5 + hole else [IDLE, IDLE]) for n in range(16)]
    found = played(rounds)[-1]
    assert (kinds(found) == ["idle"]) is is_found
    if is_found:
        assert found[0].coverage == pytest.approx(13 / 16, abs=0.001)


def test_silence_prolongs_nothing_and_then_hides_the_finding() -> None:
    rounds = [*(a_round(n, [IDLE, IDLE]) for n in range(16)), *(a_round(n, unknown="down") for n in range(16, 23))]
    found = played(rounds)
    assert [each.until_s for each in found[19]] == [T0 + 15 * STEP_S]
    assert found[-1] == []


def test_late_round_counts_the_time_without_samples_as_unknown() -> None:
    *_, last = played([a_round(n, [IDLE, IDLE]) for n in (*range(10), 13, 14, 15)])
    assert kinds(last) == ["idle"]
    assert last[0].coverage == pytest.approx(13 / 16, abs=0.001)


def test_coverage_is_that_of_the_gpu_with_the_fewest_samples() -> None:
    *_, last = played(a_round(n, [IDLE, None if 5 <= n < 8 else IDLE]) for n in range(16))
    assert (kinds(last), last[0].coverage) == (["idle"], pytest.approx(13 / 16, abs=0.001))


def test_half_of_the_samples_are_half_of_the_coverage() -> None:
    half = {**IDLE, "sample_count": 2.0}
    *_, last = played([a_round(0, [BUSY, BUSY]), *(a_round(n, [half, half]) for n in range(1, 20))])
    assert last[0].coverage == 0.5


@pytest.mark.parametrize(
    ("change", "later"),
    [
        ({"comment": "almanac:serving"}, 0), ({"is_serving": True}, 0), ({"comment": "x almanac:loading:5h"}, 0),
        ({"comment": "almanac:loading:30m"}, 1), ({"comment": "no-almanac:serving"}, 1), ({"comment": None}, 1),
    ],
)  # fmt: skip
def test_serving_and_loading_are_not_idleness_for_a_bounded_time(change: dict[str, Any], later: int) -> None:
    found = played(a_round(n, [IDLE, IDLE], {**JOB, **change}) for n in range(20))
    assert len(found[-1]) == later


def test_words_in_a_comment_are_bounded() -> None:
    words = comment_words("almanac:keep:99999h almanac:loading almanac:servings")
    assert (words.keep_s, words.loading_s, words.is_serving) == (86_400, 1800, False)


def test_requeued_job_starts_anew() -> None:
    again = {**JOB, "restarts": 1, "start_s": T0 + 10 * STEP_S}
    rounds = [*(a_round(n, [IDLE, IDLE]) for n in range(12)), *(a_round(n, [IDLE, IDLE], again) for n in range(12, 26))]
    assert not any(played(rounds))


@pytest.mark.parametrize("start_s", [T0 + 60 * STEP_S, T0 + 14 * STEP_S])
def test_samples_before_the_start_are_not_the_job_s(start_s: int) -> None:
    """A clock that is ahead, and a GPU whose samples are those of the job before."""
    assert not any(played(a_round(n, [IDLE, IDLE], {**JOB, "start_s": start_s}) for n in range(25)))


def test_renamed_node_begins_again() -> None:
    def renamed(number: int) -> Round:
        each = a_round(number, [IDLE, IDLE])
        hosts = each.gpus.set_column(1, GPUS.field("host"), pa.array(["n9", "n9"]))
        return Round(each.at_s, STEP_S, each.jobs, hosts)

    found = played([*(a_round(n, [IDLE, IDLE]) for n in range(10)), *(renamed(n) for n in range(10, 30))])
    assert not any(found[10:24])
    assert kinds(found[-1]) == ["idle"]


def test_gpu_that_was_never_used_is_named() -> None:
    *_, last = played(a_round(n, [BUSY, IDLE]) for n in range(16))
    assert kinds(last) == ["unused_gpus"]
    assert last[0].says == "ask for 1 next time, or use all: 1 of 2 GPUs never used in 32 min (n1:1)"
    *_, later = played(a_round(n, [BUSY, BUSY if n == 3 else IDLE]) for n in range(30))
    assert later == []


def test_hang_needs_two_gpus_that_wait_and_none_that_works() -> None:
    *_, last = played(a_round(n, [WAITS, WAITS]) for n in range(6))
    assert kinds(last) == ["hang"]
    *_, last = played(a_round(n, [WAITS, WAITS, IDLE], {**JOB, "gpu_count": 3}) for n in range(6))
    assert kinds(last) == ["hang"]
    for third in (BUSY, None):
        *_, last = played(a_round(n, [WAITS, WAITS, third], {**JOB, "gpu_count": 3}) for n in range(20))
        assert last == []


@pytest.mark.parametrize(
    "other",
    [{"sm_active_frac": 0.0, "gr_engine_active_frac": 0.0}, {"fp32_active_frac": 0.6}, {"nvlink_bytes_s": 1e9},
     {"dram_active_frac": float("nan")}, {"gpu_util_pct": 60.0}],
)  # fmt: skip
def test_work_and_failed_profiling_counters_are_no_hang(other: dict[str, float]) -> None:
    gpu = {**WAITS, **other}
    assert not any(played(a_round(n, [gpu, gpu]) for n in range(20)))


def test_xid_counts_when_it_changes_and_not_when_the_gauge_keeps_it() -> None:
    old, new = {**BUSY, "xid": 31.0, "xid_changes": 0.0}, {**BUSY, "xid": 79.0, "xid_changes": 0.0}
    assert not any(played(a_round(n, [old, BUSY]) for n in range(5)))
    *_, last = played(a_round(n, [old if n < 2 else new, BUSY]) for n in range(5))
    assert [(each.kind, each.until_s, each.evidence["values"]) for each in last] == [("xid", T0 + 2 * STEP_S, [79])]
    later = {**old, "xid": 13.0}
    *_, last = played(
        a_round(n, [old if n < 2 else new if n < 4 else {**later, "sample_count": 0.0}, BUSY]) for n in range(6)
    )
    assert last[0].evidence["values"] == [79]
    *_, again = played(a_round(n, [{**old, "xid_changes": float(n == 2)}, BUSY]) for n in range(5))
    assert kinds(again) == ["xid"]
    next_job = {**JOB, "job_id": 2, "start_s": T0 + 3 * STEP_S}
    rounds = [a_round(0, [old, BUSY]), *(a_round(n, [new, BUSY], next_job) for n in range(4, 12))]
    assert not any(played(rounds))


def test_slow_and_broken_hardware_is_found() -> None:
    slow = {**BUSY, "throttle_reasons": float(0x40)}
    braked = {**BUSY, "throttle_reasons": float(0x80 | 0x4)}
    worn = {**BUSY, "row_remap_failures": 1.0, "ecc_uncorrected": 2.0}
    capped = {**BUSY, "throttle_reasons": float(0x4)}
    assert kinds(played(a_round(n, [slow, BUSY]) for n in range(6))[-1]) == ["throttled"]
    assert kinds(played(a_round(n, [BUSY, braked]) for n in range(6))[-1]) == ["power_brake"]
    assert not any(played(a_round(n, [capped, capped]) for n in range(6)))
    rounds = [a_round(0, [{**worn, "ecc_uncorrected": 0.0}, BUSY]), a_round(1, [worn, BUSY])]
    assert kinds(played(rounds)[-1]) == ["ecc", "row_remap"]


def test_growing_memory_is_told_before_it_is_full() -> None:
    def grown(number: int, mib_per_round: float) -> Round:
        used = 42_000 + mib_per_round * number
        gpu = {**BUSY, "hbm_used_mib": min(used, 81_000), "hbm_total_mib": 81_920.0}
        return a_round(number, [gpu, BUSY], {**JOB, "start_s": T0 - 600})

    found = played(grown(number, 300) for number in range(125))
    first = next(number for number, each in enumerate(found) if each)
    assert kinds(found[first]) == ["memory_full"]
    assert found[first][0].evidence["full_s"] == pytest.approx(T0 + (81_920 - 42_000) / 300 * STEP_S, rel=0, abs=900)
    assert not any(played(grown(number, 0) for number in range(60)))


def test_host_memory_and_limit_come_from_the_job_s_columns() -> None:
    ends = {**JOB, "limit_end_s": T0 + 1700, "over_limit_prob": 0.9}
    full = {**JOB, "host_used_mib": 97_000.0, "host_limit_mib": 100_000.0}
    (limit,) = played([a_round(0, [BUSY, BUSY], ends)])[0]
    assert "ask the operators for more time: only they can run scontrol update jobid=1 timelimit=+60" in limit.says
    assert limit.evidence["left_s"] == 1700 and limit.evidence["chance"] == 0.9
    assert kinds(played([a_round(0, [BUSY, BUSY], full)])[0]) == ["host_memory"]
    unknown = {**full, "host_limit_mib": None}, {**ends, "over_limit_prob": 0.5}, {**ends, "limit_end_s": T0 + 2000}
    assert not any(played([a_round(0, [BUSY, BUSY], job)])[0] for job in unknown)


def test_frozen_exporter_is_suspect() -> None:
    def at(number: int, power_w: float) -> Round:
        return a_round(number, [{**IDLE, "power_w": power_w}] * 2)

    assert played(at(n, 61.0) for n in range(20))[-1][0].is_suspect
    assert not played(at(n, 61.0 + n % 3 / 100) for n in range(20))[-1][0].is_suspect


@pytest.mark.parametrize(
    ("lacks", "name", "is_suspect"),
    [("power_w", "1", True), ("gpu_util_pct", "1", True), ("power_w", "1:7", True), ("gpu_util_pct", "1:7", False)],
)
def test_a_gpu_without_power_or_use_is_suspect(lacks: str, name: str, is_suspect: bool) -> None:
    """GPU_UTIL is not given for MIG slices."""

    def at(number: int) -> Round:
        gpus = [{**IDLE, "power_w": 61.0 + number % 3}, {**IDLE, "power_w": 61.0 + number % 3, lacks: float("nan")}]
        each = a_round(number, gpus)
        names = each.gpus.set_column(2, GPUS.field("gpu"), pa.array(["0", name]))
        return Round(each.at_s, STEP_S, each.jobs, names)

    *_, last = played(at(n) for n in range(20))
    assert [(each.kind, each.is_suspect) for each in last] == [("idle", is_suspect)]


def test_the_state_of_another_release_is_not_whole() -> None:
    state, _ = decide(None, a_round(0, [IDLE, IDLE]))
    assert state.is_whole and WatchState().is_whole and decide(None, a_round(0))[0].is_whole
    columns = state.columns
    for other in (
        {}, {**columns, "new": bytes(16)}, {**columns, "seen_s": bytes(8)},
        {name: values for name, values in columns.items() if name != "xid_met"},
    ):  # fmt: skip
        assert not msgspec.structs.replace(state, columns=other).is_whole


def test_commands_name_one_task_of_an_array() -> None:
    task = {**JOB, "job_id": 100, "array_job_id": 100, "array_task_id": 4, "limit_end_s": T0 + 3500,
            "over_limit_prob": 0.9}  # fmt: skip
    *_, last = played(a_round(number, [IDLE, IDLE], task) for number in range(16))
    idle, limit = last
    assert "scancel 100_4." in idle.says and "jobid=100_4 " in limit.says


def test_wrong_clocks_find_nothing() -> None:
    state, _ = decide(None, a_round(0, [IDLE, IDLE]))
    assert decide(state, a_round(0, [IDLE, IDLE])) == (state, [])
    assert decide(WatchState(at_s=T0 + 10**6), a_round(0, [IDLE, IDLE]))[0].at_s == T0


def test_state_of_ended_jobs_and_lost_gpus_is_dropped() -> None:
    state: WatchState | None = None
    for number in range(4):
        state, _ = decide(state, a_round(number, [IDLE, IDLE], {**JOB, "job_id": number + 1}))
    assert state is not None
    assert len(state.gpus) == 2
    for number in range(4, 12):
        state, _ = decide(state, a_round(number, [], {**JOB, "job_id": 4}))
    assert (state.gpus, state.growth) == ([], {})
    assert all(len(values) == 0 for values in state.columns.values())
    assert RULES.silence_s < 8 * STEP_S
    assert np.isfinite(state.at_s)
