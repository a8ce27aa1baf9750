"""MIG slices in advice files: what the prompt offers of them, and what `advise` shows."""

from __future__ import annotations

from typing import Any

import pytest
from advice_lines import parse

from almanac.config import Priority, Tier
from almanac.records import JobRequest
from slurm_hooks.advice.file import AdviceFile, AdviceRow
from slurm_hooks.advice.sched import FORMAT, SLICE_FORMAT, render
from slurm_hooks.advice.shown import explain, from_files
from slurm_hooks.submit.offer import NodeRequest, is_offered, needs_of, wanted
from slurm_hooks.submit.proposal import message, propose

NOW_S = 1_795_256_200
TIERS = (
    Tier(name="small", capacity_mib=9728, gres="1g.10gb"),
    Tier(name="one", capacity_mib=19968, gres="1g.20gb"),
    Tier(name="two", capacity_mib=19968, gres="2g.20gb"),
    Tier(name="rtx", capacity_mib=19968, gres="rtx"),
    Tier(name="own", capacity_mib=30000, gres="own", compute_slices=3),
    Tier(name="a100", capacity_mib=81920, gres="a100"),
)
TEXT = "about 1 in 100 such jobs needs more than 7.9 GiB; it runs about 1.2 times as long as on a whole GPU."
OPTIONS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--tres-per-task")


def advice(tier: str, gpus: int = 1, tiers: tuple[Tier, ...] = TIERS) -> AdviceFile:
    row = AdviceRow("F", 3600, 6397, "train-#", gpus, 8000, tier, "", TEXT)
    return AdviceFile("v", NOW_S - 60, NOW_S + 60, "observe", False, "ask", Priority(), tiers, (row,))


def request(option: str = "--gpus", text: str = "1", **more: Any) -> JobRequest:
    gres, options = (text, ()) if option == "--gres" else ("", ((option, text),))
    return JobRequest("ann", "train-7", gres=gres, gpu_options=options, **{"gpu_count": 1, **more})


def test_only_files_with_slices_are_of_the_new_format() -> None:
    for tiers, file_format in ((TIERS, SLICE_FORMAT), (TIERS[-1:], FORMAT), ((), FORMAT)):
        content = render(advice("a100", tiers=tiers))
        assert content.startswith(f"almanac-advice\t{file_format}\n".encode())
        assert parse(content, NOW_S) == advice("a100", tiers=tiers)


def test_the_message_names_the_cost() -> None:
    found = propose(request("--gres", "gpu:a100:1", gpu_type="a100"), advice("small"))
    assert found is not None
    assert (found.change.option, found.change.value) == ("--gres", "gpu:1g.10gb:1")
    assert message(found) == (
        "almanac: small is enough: about 1 in 100 such jobs needs more than 7.9 GiB; it\n"
        "         runs about 1.2 times as long as on a whole GPU.\n"
        "         With small, it frees 1 a100 for others.\n"
    )


@pytest.mark.parametrize("more", [{"may_use_more": True}, {"node_count": 2}, {"gpu_count": 2}])
def test_nothing_is_said_to_a_job_that_may_use_more(more: dict[str, Any]) -> None:
    file = advice("small", more.get("gpu_count", 1))
    assert propose(request(**more), file) is None
    shown = explain(from_files(request(**more), file, None))
    assert "small" not in shown
    assert "1g.10gb" not in shown


def test_advise_without_the_store_shows_the_option() -> None:
    shown = explain(from_files(request(), advice("small"), None))
    assert '(--gpus "1g.10gb:1")' in " ".join(shown.split())
    assert max(map(len, shown.split("\n"))) <= 80
    kept = from_files(request(text="1g.10gb:1", gpu_type="1g.10gb"), advice("small"), None)
    assert kept.tier.reason == "fits"


LISTING = """\
gpu*|1|64|512000|gpu|gpu:1g.10gb:7(S:0-1),gpu:a100:3(S:0-1)|2-00:00:00|up|all
gpu*|4|64|512000|gpu|gpu:a100:4|2-00:00:00|up|all
mig|1|64|512000|gpu|gpu:2g.20gb:3|2-00:00:00|up|all
"""


@pytest.mark.parametrize(
    ("option", "tier", "partition", "expected"),
    [
        ("--gpus", "small", "", True),
        ("--gpus-per-node", "small", "gpu", True),
        ("--gpus-per-task", "two", "mig", True),
        ("--gres", "two", "mig", True),
        ("--gpus", "two", "gpu", False),
        ("--gpus", "one", "", False),
        ("--gpus", "small", "gpu,mig", False),
    ],
)
def test_nodes_must_have_the_type(option: str, tier: str, partition: str, expected: bool) -> None:
    """The type counts whichever option names it: an earlier almanac looked at --gres only."""
    target = next(each for each in TIERS if each.name == tier)
    text = "gpu:1" if option == "--gres" else "1"
    asked = request(option, text, partition=partition)
    found = propose(asked, advice(tier))
    assert found is not None
    node_request = wanted(asked, found.change, target)
    assert node_request == NodeRequest(partition, (), target.gres)
    assert is_offered(LISTING, node_request, needs_of({option.removeprefix("--"): text}, 1)) is expected
