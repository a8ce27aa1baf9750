"""Types that a request allows, consent by comment and options, and run times from the trained table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_slurm import NOW_S, Job

from advisor.artefacts import current_version, save
from advisor.duration.blend import COVERAGE
from advisor.service import train
from advisor.types import times as speed_site
from advisor.types.runs import load_speed_runs
from almanac.config import Config
from almanac.errors import NoModelError, StoreError
from almanac.tres import gpu_types, parse_gpus
from slurm.queue import parse_queue
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.log import is_sendable
from slurm_hooks.orders import job_facts, must_still_hold
from slurm_hooks.types.decide import usable_times
from slurm_hooks.types.request import accepts_any, checkpoint_signal, is_movable, names_one, requeue_terms, type_request
from slurm_hooks.types.run import no_speeds, speeds_or_fault, stored_speeds
from telemetry.history import HISTORY
from telemetry.store.store import ClusterStore, Store

TYPES = ("a100", "h100", "v100")


@pytest.mark.parametrize(
    ("text", "allowed", "new"),
    [
        ("", {*TYPES}, "h100"),
        ("[a100|h100]", {"a100", "h100"}, "h100"),
        ("(a100|h100)", {"a100", "h100"}, "h100"),
        ("a100|h100", {"a100", "h100"}, "h100"),
        ("a100", {*TYPES}, "h100"),
        ("ib&[a100|h100]&ssd", {"a100", "h100"}, "ib&h100&ssd"),
        ("ib", {*TYPES}, "ib&h100"),
        ("ib|ssd", {*TYPES}, "(ib|ssd)&h100"),
        ("(ib|ssd)&a100", {*TYPES}, "(ib|ssd)&h100"),
    ],
)
def test_a_constraint_names_its_types(text: str, allowed: set[str], new: str) -> None:
    request = type_request(text, {}, TYPES, "constraint")
    assert request is not None
    assert (request.text, request.allowed, request.of("h100")) == (text, allowed, new)


@pytest.mark.parametrize(
    "text",
    ["a100*2", "[a100*1&h100*1]", "[a100|ssd]", "a100&h100", "[a100|[h100|v100]]", "a100|h100&ib", "[a100", "a100]",
     "!a100", "a 100", "a100;x", "a100\nh100", "&a100", "a100&", "a" * 1025],
)  # fmt: skip
def test_other_constraints_are_left_alone(text: str) -> None:
    assert type_request(text, {}, TYPES, "constraint") is None


@pytest.mark.parametrize(
    ("requests", "new"),
    [
        ({"TresPerNode": "gres/gpu:a100:2"}, "gres/gpu:h100:2"),
        ({"TresPerNode": "gres/gpu:2"}, "gres/gpu:h100:2"),
        ({"TresPerJob": "gres/gpu:a100:2"}, "gres/gpu:h100:2"),
        ({"TresPerTask": "cpu=4,gres/gpu:a100=1"}, "cpu=4,gres/gpu:h100=1"),
        ({"TresPerTask": "gres/gpu=1"}, "gres/gpu:h100=1"),
        ({"TresPerNode": "gres/gpu"}, "gres/gpu:h100"),
    ],
)
def test_a_gres_request_is_changed_in_place(requests: dict[str, str], new: str) -> None:
    request = type_request("", requests, TYPES, "gres")  # type: ignore[arg-type]
    assert request is not None
    assert request.of("h100") == new
    assert request.text in requests.values()


@pytest.mark.parametrize(
    "requests",
    [{}, {"TresPerNode": "gres/gpu:k80:1"}, {"TresPerNode": "gres/gpu:a100:1,gres/gpu:h100:1"},
     {"TresPerNode": "gres/gpu:a100:1,gres/nvme:1"}, {"TresPerSocket": "gres/gpu:a100:1"},
     {"TresPerNode": "gres/gpu:a100:1", "TresPerJob": "gres/gpu:a100:1"}, {"TresPerNode": "gres/gpu:a100:1 x=1"}],
)  # fmt: skip
def test_other_gres_requests_are_left_alone(requests: dict[str, str]) -> None:
    assert type_request("", requests, TYPES, "gres") is None  # type: ignore[arg-type]


@given(st.text(alphabet="ah10v&|[]()!*, \n;='\"", max_size=24))
def test_any_constraint_gives_one_word_or_nothing(text: str) -> None:
    request = type_request(text, {}, TYPES, "constraint")
    if request is not None:
        assert is_sendable(request.of("h100"))
        again = type_request(request.of("h100"), {}, TYPES, "constraint")
        assert again is not None
        assert names_one(again) == "h100"


@pytest.mark.parametrize(
    ("comment", "any_gpu", "movable"),
    [
        ("almanac:any-gpu", True, False),
        ("run 7, almanac:any-gpu,almanac:movable please", True, True),
        ("almanac:movable", False, False),
        ("almanac:any-gpus", False, False),
        ("xalmanac:any-gpu", False, False),
        ("ALMANAC:ANY-GPU", False, False),
        ("not;almanac:any-gpu", False, False),
        ("almanac:any-gpu\nalmanac:movable", True, True),
        ("almanac:any-gpu " * 5000, False, False),
        ("", False, False),
    ],
)
def test_only_whole_words_of_a_comment_consent(comment: str, any_gpu: bool, movable: bool) -> None:
    assert (accepts_any(comment), is_movable(comment)) == (any_gpu, movable)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("B:USR1@120", ("USR1", True, 120)), ("USR2", ("USR2", False, 60)), ("SIGTERM@5", ("TERM", False, 5)),
     ("10@30", ("USR1", False, 30)), ("RB:usr1@9", ("USR1", True, 9)), ("KILL", None), ("9@10", None), ("STOP", None),
     ("USR1;x", None), ("", None), ("NOPE", None), ("USR1@999999", None)],
)  # fmt: skip
def test_the_checkpoint_signal(text: str, shown: tuple[str, bool, int] | None) -> None:
    found = checkpoint_signal(text)
    assert (found and (found.name, found.is_batch, found.before_s)) == shown


APPEND = "#!/bin/sh\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@30\n"


@pytest.mark.parametrize(
    ("script", "line", "default", "why_not"),
    [
        (APPEND, "sbatch run.sh", False, ""),
        (APPEND, "", False, "submit line"),
        (APPEND, "sbatch --comment=x, y --open-mode=truncate run.sh", False, "empty its output"),
        (APPEND, "sbatch --open-mode t run.sh", True, "empty its output"),
        ("#!/bin/sh\n#SBATCH --signal=USR1\n", "sbatch run.sh", False, "empty its output"),
        ("#!/bin/sh\n#SBATCH --signal=USR1\n", "sbatch run.sh", True, ""),
        ("#!/bin/sh\n", "sbatch --open-mode=append --signal=USR1@30 run.sh", False, ""),
        ("#!/bin/sh\n", "sbatch --open-mode=append run.sh", False, "no --signal"),
        ("#!/bin/sh\n", "sbatch --open-mode=append --signal=KILL run.sh", False, "none that leaves it running"),
        ("#!/bin/sh\n#SBATCH --comment='x\n", "sbatch run.sh", True, "cannot be read"),
    ],
)
def test_the_terms_of_a_requeue(script: str, line: str, default: bool, why_not: str) -> None:
    found = requeue_terms(script, line, default).why_not
    assert (why_not in found) if why_not else not found


@pytest.mark.parametrize("script", ["#SBATCH " + "a " * 2_000_000, "#SBATCH -J a\n" * 300_000, "#\n" * 2_000_000])
def test_a_script_with_megabytes_of_options_allows_nothing(script: str) -> None:
    assert requeue_terms(script, "sbatch run.sh", False).why_not == "its script's options cannot be read"


def test_a_long_script_below_its_options_is_read() -> None:
    assert requeue_terms(f"{APPEND}sleep 1\n{'x' * 4_000_000}", "sbatch run.sh", False).why_not == ""


@pytest.mark.parametrize("text", ["(" * 1_000_000, "gpu:1(IDX:" * 100_000, "gpu:a," * 200_000])
def test_a_long_request_of_gpus_is_read_in_linear_time(text: str) -> None:
    """Seconds for each became hours: the square of a million."""
    gpu_types(text)
    parse_gpus(text)
    assert type_request("", {"TresPerJob": text}, ("a",), "gres") is None


SPEED_TYPES = ("a100", "h100")
JobsOf = Callable[[Store, list[dict[str, Any]]], None]


def queued(limit_min: int = 1440, user: str = "ann") -> QueuedJob:
    row = Job(11, limit_min=limit_min, user=user).record(True)
    [job] = parse_queue(json.dumps({"jobs": [row]}).encode(), "lab").jobs
    return job


def test_the_end_of_its_last_run_is_no_change_of_a_requeued_job() -> None:
    """Slurm tells it, in 22.05 until the processes of that run are gone."""
    job = queued()
    ending = replace(job, end_s=NOW_S, exit_code=0, exit_signal=15, error_file="/home/ann/n1.err")
    assert must_still_hold({11: job_facts(ending)}, lambda _ids: {11: job_facts(job)}) == {}
    assert must_still_hold({11: job_facts(ending)}, lambda _ids: {11: job_facts(replace(job, time_limit_s=60))}) != {}


def untrained(tmp_path: Path, jobs_of: JobsOf, types: Sequence[str] = SPEED_TYPES) -> ClusterStore:
    """ann's and bob's job ran about an hour on the first type, and about half an hour on the second."""
    store = Store.create(tmp_path / "store")
    jobs_of(store, [
        {
            "job_id": number + 1, "submit_s": NOW_S - 90_000 + number * 600, "user": "ann" if number % 4 < 2 else "bob",
            "name": "x\nJobId=1", "gpu_count": 1, "gpu_type": types[number % 2], "constraints": "",
            "elapsed_s": (3600, 1800)[number % 2] + 100 * (number % 5),
        }
        for number in range(32)
    ])  # fmt: skip
    return store.of("lab")


def trained(tmp_path: Path, jobs_of: JobsOf, types: Sequence[str] = SPEED_TYPES) -> ClusterStore:
    store = untrained(tmp_path, jobs_of, types)
    speeds = speed_site.learn_site_speeds(load_speed_runs(store), Config(), NOW_S)
    save(train(HISTORY.empty_table().to_pandas(), Config(), NOW_S), store.models_dir, speeds=speeds)
    return store


def test_times_are_those_of_the_trained_table(tmp_path: Path, jobs_of: JobsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not learned again, and only the runs of the users who wait are read."""
    store = trained(tmp_path, jobs_of)
    for name in ("learn_site_speeds", "learn_types", "learn_speeds"):
        monkeypatch.delattr(speed_site, name)
    speeds = stored_speeds(store, Config(), NOW_S, {"ann"})
    assert speeds([queued(user="bob")], SPEED_TYPES)[11] == []
    ann = speeds([queued()], SPEED_TYPES)[11]
    times = {each.gpu_type: each for each in ann}
    assert 3400 < times["a100"].run_s < 4100
    assert 1700 < times["h100"].run_s < 2300
    assert all(each.low_s < each.run_s < each.high_s <= each.longest_s for each in ann)


def test_the_interval_is_that_of_a_run(tmp_path: Path, jobs_of: JobsOf) -> None:
    store, config = trained(tmp_path, jobs_of), Config()
    [known, *_] = stored_speeds(store, config, NOW_S, {"ann"})([queued()], SPEED_TYPES)[11]
    table = speed_site.learn_site_speeds(load_speed_runs(store), config, NOW_S)
    families = speed_site.user_families(load_speed_runs(store), table, config, NOW_S)
    [usual, *_] = speed_site.request_times(queued().request(), families, table, None, config)
    assert (known.low_s, known.high_s) == pytest.approx(usual.next_run(COVERAGE))
    assert known.low_s < usual.low_s < usual.high_s < known.high_s


def test_the_time_limit_must_hold_a_long_run(tmp_path: Path, jobs_of: JobsOf) -> None:
    found = stored_speeds(trained(tmp_path, jobs_of), Config(), NOW_S, {"ann"})([queued()], SPEED_TYPES)[11]
    [fast] = [each for each in found if each.gpu_type == "h100"]
    needed_min = int(fast.longest_s // 60) + 1
    assert set(usable_times(queued(limit_min=needed_min), found, ["h100"])) == {"h100"}
    assert usable_times(queued(limit_min=needed_min - 1), found, ["h100"]) == {}


def test_a_table_must_know_two_of_the_types(tmp_path: Path, jobs_of: JobsOf) -> None:
    speeds = stored_speeds(trained(tmp_path, jobs_of, ("a100", "v100")), Config(), NOW_S, {"ann"})
    with pytest.raises(NoModelError, match=r"1 of 2 GPU types \(a100, v100\)"):
        speeds([queued()], SPEED_TYPES)
    assert no_speeds([queued()], ("a100",)) == {}


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 4}', '{"schema": 4, "speeds": {"names": 7}}'])
def test_a_damaged_table(tmp_path: Path, jobs_of: JobsOf, content: str) -> None:
    store = trained(tmp_path, jobs_of)
    path = store.models_dir / "speed" / str(current_version(store.models_dir)) / "meta.json"
    path.chmod(0o644)
    path.write_text(content)
    with pytest.raises(StoreError) as caught:
        speeds_or_fault(store, Config(), NOW_S, {"ann"})([queued()], SPEED_TYPES)
    assert "almanac train" in caught.value.hint
