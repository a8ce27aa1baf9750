"""Look for nodes for a whole rewritten submission."""

from __future__ import annotations

import dataclasses

import pytest

from almanac.config import Tier
from almanac.records import JobRequest
from almanac.tiers import Rewrite
from slurm_hooks.submit.offer import MAX_AGE_S, NodeRequest, is_offered, kept, needs_of, to_keep, wanted

LISTING = """\
gpu*|6|64|512000|gpu,hbm40g|gpu:a100:4(S:0-1)|2-00:00:00|up|all
gpu*|2|128|1024000|gpu,hbm80g,nvlink|gpu:a100:4(S:0,1)|2-00:00:00|up|all
small|1|32|256000|gpu,hbm40g|gpu:a100:2,gpu:v100:2|1:00:00|up|all
tiny|1|1|8000|gpu|gpu:1|infinite|up|all
noon|1|64|512000|gpu|gpu:4|12:00:00|up|all
cpu|9|64|256000|(null)|(null)|infinite|up|all
closed|9|64|256000|gpu,hbm40g|gpu:a100:4|infinite|down|all
staff|9|64|256000|gpu,hbm40g|gpu:a100:4|infinite|up|staff
"""
HBM40 = Tier(name="hbm40g", capacity_mib=40960, constraint="hbm40g")
CASES: list[tuple[dict[str, str], int, NodeRequest, bool | None]] = [
    ({}, 4, NodeRequest("", ("gpu", "hbm40g"), ""), True),
    ({}, 4, NodeRequest("gpu", ("gpu", "nvlink", "hbm40g"), ""), False),
    ({}, 4, NodeRequest("gpu", ("gpu", "hbm80", "hbm40g"), ""), False),
    ({}, 24, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({}, 25, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"nodes": "6"}, 6, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"nodes": "7-9"}, 7, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"nodes": "1-0"}, 4, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"nodes": "1"}, 8, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"nodes": "2"}, 8, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"nodes": "1-2"}, 8, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"nodes": "1-2:1"}, 9, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"nodes": "1,3"}, 9, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"nodes": "1-x"}, 4, NodeRequest("gpu", ("hbm40g",), ""), None),
    ({"nodes": "65534"}, 4, NodeRequest("gpu", ("hbm40g",), ""), None),
    ({"ntasks": "8", "gpus-per-task": "1"}, 8, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"gpus-per-task": "a100:8"}, 8, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"tres-per-task": "gres/gpu:8"}, 8, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"ntasks-per-node": "5", "gpus-per-task": "1"}, 5, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"nodes": "1k"}, 4, NodeRequest("gpu", ("hbm40g",), ""), None),
    ({"gpus-per-node": "4"}, 4, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"gpus-per-node": "5"}, 5, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"gpus-per-node": "a100:8"}, 8, NodeRequest("gpu", ("hbm40g",), "a100"), False),
    ({"gres": "gpu:a100:2,nvme:1"}, 2, NodeRequest("small", ("hbm40g",), "a100"), True),
    ({"gres": "gpu:a100:3"}, 3, NodeRequest("small", ("hbm40g",), "a100"), False),
    ({"gres": "gpu:4"}, 4, NodeRequest("small", ("hbm40g",), ""), True),
    ({}, 2, NodeRequest("gpu", ("hbm40g",), "h100"), False),
    ({}, 2, NodeRequest("gpu,small", ("hbm40g",), ""), True),
    ({}, 2, NodeRequest("gpu,small", ("hbm80g",), ""), False),
    ({}, 2, NodeRequest("nowhere", ("hbm40g",), ""), False),
    ({}, 1, NodeRequest("cpu", (), ""), False),
    ({}, 1, NodeRequest("tiny", (), ""), True),
    ({"mincpus": "2"}, 1, NodeRequest("tiny", (), ""), False),
    ({"cpus-per-task": "64"}, 1, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"cpus-per-task": "65"}, 1, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"ntasks": "8", "cpus-per-task": "16"}, 1, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"ntasks": "8", "cpus-per-task": "16", "nodes": "2"}, 2, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"ntasks": "8", "ntasks-per-node": "1"}, 8, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"cpus-per-gpu": "17", "gpus-per-node": "4"}, 4, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"mem": "500G"}, 1, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"mem": "501G"}, 1, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"mem": "0?"}, 1, NodeRequest("gpu", ("hbm40g",), ""), True),
    ({"mem": "much"}, 1, NodeRequest("gpu", ("hbm40g",), ""), None),
    ({"mem-per-cpu": "9G", "cpus-per-task": "64"}, 1, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({"mem-per-gpu": "1T"}, 1, NodeRequest("gpu", ("hbm40g",), ""), False),
    ({}, 1, NodeRequest("gpu", None, ""), None),
    ({}, 1, NodeRequest("small", (), "", is_moved=True), True),
    ({"time": "1:00:00"}, 1, NodeRequest("small", (), "", is_moved=True), True),
    ({"time": "01:00:01"}, 1, NodeRequest("small", (), "", is_moved=True), False),
    ({"time": "12:00:00"}, 1, NodeRequest("noon", (), "", is_moved=True), True),
    ({"time": "12:00:01"}, 1, NodeRequest("noon", (), "", is_moved=True), False),
    ({"time": "2982616-04:14:00"}, 1, NodeRequest("gpu", (), "", is_moved=True), True),
    ({"time": "2:00:00"}, 1, NodeRequest("small", (), ""), True),
    ({}, 1, NodeRequest("closed", (), "", is_moved=True), False),
    ({}, 1, NodeRequest("staff", (), "", is_moved=True), False),
    ({}, 1, NodeRequest("staff", (), ""), True),
]


@pytest.mark.parametrize(("options", "gpus", "asked", "expected"), CASES)
def test_the_whole_request_has_to_be_met(
    options: dict[str, str], gpus: int, asked: NodeRequest, expected: bool | None
) -> None:
    assert is_offered(LISTING, asked, needs_of(options, gpus)) is expected


def test_what_is_asked_for_after_the_change() -> None:
    request = JobRequest("a", "x", constraints="gpu&hbm80g", partition="p", gpu_count=2, gpu_type="a100")
    assert wanted(request, Rewrite("--constraint", "gpu&hbm40g"), HBM40) == NodeRequest("p", ("gpu", "hbm40g"), "a100")
    assert wanted(request, Rewrite("--partition", "q"), HBM40) == NodeRequest("q", ("gpu", "hbm80g"), "a100", True)
    by_type = Tier(name="t", capacity_mib=1, gres="h100")
    assert wanted(request, Rewrite("--gres", "gpu:h100:2"), by_type) == NodeRequest("p", ("gpu", "hbm80g"), "h100")
    choice = dataclasses.replace(request, constraints="a|b")
    assert wanted(choice, Rewrite("--gres", "gpu:h100:2"), by_type).features is None


@pytest.mark.parametrize(
    ("text", "now_s", "place", "is_kept"),
    [
        (to_keep(LISTING, 1000, "host:"), 1000, "host:", True),
        (to_keep(LISTING, 1000, "host:"), 1000 + MAX_AGE_S - 1, "host:", True),
        (to_keep(LISTING, 1000, "host:"), 1000 + MAX_AGE_S, "host:", False),
        (to_keep(LISTING, 1000, "host:"), 999, "host:", False),
        (to_keep(LISTING, 1000, "host:"), 1000, "host:/other", False),
        (to_keep(LISTING, 1000, "a b\n:"), 1000, "a b\n:", True),
        ("", 1000, "host:", False),
        (LISTING, 1000, "host:", False),
    ],
)
def test_a_kept_listing_serves_for_five_minutes_and_one_cluster(
    text: str, now_s: int, place: str, is_kept: bool
) -> None:
    assert kept(text, now_s, place) == (LISTING if is_kept else None)
