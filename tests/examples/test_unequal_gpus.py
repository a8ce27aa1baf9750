"""The sampler on real ranks over gloo, run by the system's Python, which has Debian's PyTorch."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = "/usr/bin/python3"
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    has_torch = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    if not has_torch and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"{PYTHON} lacks torch (python3-torch), and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
    if not has_torch:
        pytest.skip("python3-torch is not installed")
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("gloo_ranks.py")
    done = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, env=environment, check=True)
    checks: Results = json.loads(done.stdout.splitlines()[-1])
    failed = [rank["failed"] for ranks in checks.values() for rank in ranks if "failed" in rank]
    assert not failed, failed[0]
    return checks


def test_the_gradient_of_unequal_batches_is_that_of_one_process(results: Results) -> None:
    ranks = results["gradient_of_one_step"]
    assert [rank["local"] for rank in ranks] == [1, 7, 24]
    assert max(rank["error"] for rank in ranks) < 1e-6 < min(rank["unscaled_error"] for rank in ranks)
    assert max(rank["error"] for rank in results["accumulation"]) < 1e-6


def test_two_hundred_steps_give_the_same_losses_while_the_plan_changes(results: Results) -> None:
    ranks = results["two_hundred_steps"]
    assert [rank["n_steps"] for rank in ranks] == [200] * 3
    assert max(rank["worst"] for rank in ranks) < 1e-5
    assert all(rank["seen_once"] for rank in ranks)
    assert ranks[0]["plans"] > 2
    slow, fast, middle = ranks[0]["last"]
    assert slow < middle < fast <= 20 and slow + middle + fast == 32


def test_two_ranks_go_on_where_three_stopped_in_an_epoch(results: Results) -> None:
    ranks = results["half_an_epoch"] + results["rest_of_the_epoch"]
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(50))
    for rank in results["rest_of_the_epoch"]:
        assert (rank["left"], rank["next"], rank["epoch"]) == (0, 7, 3)


def test_a_state_of_an_epochs_end_repeats_no_epoch(results: Results) -> None:
    assert [rank["steps"] for rank in results["resumed_at_the_end"]] == [[0, 3, 3]] * 3


def test_wrong_use_is_told(results: Results) -> None:
    for rank in results["refusals"]:
        assert len(rank["warned"]) == 1 and "BatchNorm in 1 " in rank["warned"][0]
        outside, *texts = rank["texts"]
        assert "inside the loop" in outside
        assert "call step() once" in texts[0] and "one per rank" in texts[1]
        assert "raise a cap" in texts[2] and "9 samples" in texts[3]
