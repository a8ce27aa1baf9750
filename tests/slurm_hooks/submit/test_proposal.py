"""The message and the question for a submission, and when they are due."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from almanac.config import Priority, Tier
from almanac.records import JobRequest
from almanac.submit_config import SubmitMode
from almanac.tiers import Rewrite
from slurm_hooks.advice.file import AdviceFile, AdviceRow
from slurm_hooks.submit.choices import Choice, ChoiceWord, parse
from slurm_hooks.submit.proposal import (
    PromptAction,
    Proposal,
    action,
    answer,
    checked,
    message,
    new_choice,
    propose,
    question,
    typed,
)

OFF, SHOW, ASK, APPLY = get_args(SubmitMode)
ASKED, ALWAYS, NEVER = get_args(ChoiceWord)
NOW_S = 1_795_256_200
HBM40, HBM80 = (
    Tier(name="hbm40g", capacity_mib=40960, constraint="hbm40g"),
    Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),
)
TEXT = (
    'your last 14 runs of "train-bert" peaked at 21.3 GiB per GPU; about 1 in 100 such jobs needs more than 24.8 GiB.'
)
ROW = AdviceRow("F", 3600, 6397, "train-bert-#", 2, 25395, "hbm40g", "hbm80g=40 min", TEXT)


def advice(*rows: AdviceRow, tiers: tuple[Tier, ...] = (HBM40, HBM80)) -> AdviceFile:
    return AdviceFile("v", NOW_S - 60, NOW_S + 60, "observe", False, ASK, Priority(), tiers, rows or (ROW,))


def request(constraints: str = "gpu&hbm80g", **more: Any) -> JobRequest:
    return JobRequest("alice", **{"job_name": "train-BERT-7", "constraints": constraints, "gpu_count": 2, **more})


def proposal(constraints: str = "gpu&hbm80g", row: AdviceRow = ROW) -> Proposal:
    found = propose(request(constraints), advice(row))
    assert found is not None
    return found


def test_the_message_of_the_issue() -> None:
    assert message(proposal()) + question(proposal()) == (
        'almanac: hbm40g is enough: your last 14 runs of "train-bert" peaked at 21.3 GiB\n'
        "         per GPU; about 1 in 100 such jobs needs more than 24.8 GiB.\n"
        "         With hbm40g, it starts about 40 min earlier (half of such jobs did) and\n"
        "         frees 2 hbm80g for others.\n"
        '         Submit with -C "gpu&hbm40g" instead?\n'
        "         [y]es, [N]o, [a]lways, or ne[v]er for this job: "
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("gpu&hbm80g"), "gpu&hbm40g"),
        (request("hbm80g"), "hbm40g"),
        (request(""), "hbm40g"),
        (request("gpu"), "gpu&hbm40g"),
        (request("[hbm80g*2]"), ""),
        (request("gpu", gpu_type="a100"), ""),
    ],
)
def test_a_change_is_offered_where_it_can_be_made(asked: JobRequest, said: str) -> None:
    found = propose(asked, advice())
    assert found is not None
    assert found.change.value == said


@pytest.mark.parametrize(
    "asked",
    [
        request("gpu&hbm40g"),
        request("hbm40g|hbm80g"),
        request(job_name="another"),
        request(gpu_count=4),
        request(gpu_count=0),
    ],
    ids=["asked for already", "a choice", "another name", "another number of GPUs", "no GPU"],
)
def test_nothing_is_said(asked: JobRequest) -> None:
    assert propose(asked, advice()) is None


def test_rows_without_a_tier_say_nothing() -> None:
    no_tier = dataclasses.replace(ROW, tier=None)
    everybody = AdviceRow("U", 3600, 0)
    assert propose(request(), advice(no_tier)) is None
    assert propose(request(), advice(everybody)) is None
    assert propose(request(), advice(tiers=())) is None


def test_a_larger_tier_is_proposed_with_the_reason() -> None:
    row = dataclasses.replace(ROW, tier="hbm80g", gains="", text="your runs peak at 61.0 GiB.")
    for constraints, head in (("gpu&hbm40g", "hbm40g is too small, "), ("gpu", "")):
        said = message(proposal(constraints, row))
        assert said == f"almanac: {head}hbm80g is enough: your runs peak at 61.0 GiB.\n"


@pytest.mark.parametrize(
    ("is_offered", "value", "said"),
    [
        (True, "gpu&hbm40g", ""),
        (False, "", 'No change: almanac found no nodes for this job with -C "gpu&hbm40g".'),
        (None, "", 'No change: almanac could not check for nodes with -C "gpu&hbm40g".'),
    ],
)
def test_what_no_node_is_known_to_take_is_only_said(is_offered: bool | None, value: str, said: str) -> None:
    found = checked(proposal(), is_offered)
    assert found.change.value == value
    shown = " ".join(message(found).split())
    assert shown.endswith(said or "for others.")
    assert action(APPLY, found, None, NOW_S) is (PromptAction.CHANGE if value else PromptAction.NOTHING)
    assert action(ASK, found, None, NOW_S) is (PromptAction.ASK if value else PromptAction.TELL)


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_fit_the_terminal_and_keep_numbers_with_their_units(columns: int) -> None:
    for runs in range(14, 10**8, 9_999_937):
        row = dataclasses.replace(ROW, text=f"your last {runs} {TEXT.partition(' 14 ')[2]}")
        found = proposal(row=row)
        lines = (message(checked(found, None), columns) + question(found, columns)).split("\n")
        assert max(map(len, lines)) <= columns
        assert not [line for line in lines if line[-1].isdigit()]


@pytest.mark.parametrize("term", ["hbm80", "hbm80gb", "HBM80G", "hbm81g", "hbn80g"])
def test_a_misspelled_tier_is_not_appended_to(term: str) -> None:
    found = proposal(f"gpu&{term}")
    assert found.change.value == ""
    assert f'the constraint names "{term}", perhaps a misspelled hbm' in found.change.why_not


def test_a_tier_of_the_same_size_is_kept() -> None:
    other = Tier(name="other40", capacity_mib=40960, constraint="other40")
    assert propose(request("other40"), advice(tiers=(HBM40, HBM80, other))) is None


def test_tiers_of_different_kinds_are_told_not_offered() -> None:
    by_type = Tier(name="big", capacity_mib=81920, gres="h100")
    found = propose(request("", gres="gpu:h100:2", gpu_type="h100"), advice(tiers=(HBM40, by_type)))
    assert found is not None
    assert found.change.value == ""


def chosen(word: str, seconds_ago: int = 0, tier: str = "hbm40g") -> Choice:
    return Choice("train-bert-#", 2, word, tier, NOW_S - seconds_ago)


@pytest.mark.parametrize(
    ("mode", "earlier", "expected"),
    [
        (ASK, None, PromptAction.ASK),
        (SHOW, None, PromptAction.TELL),
        (APPLY, None, PromptAction.CHANGE),
        (OFF, None, PromptAction.NOTHING),
        (ASK, chosen(ASKED, 3599), PromptAction.NOTHING),
        (ASK, chosen(ASKED, 3600), PromptAction.ASK),
        (ASK, chosen(ASKED, -60), PromptAction.ASK),  # a clock that was wrong
        (SHOW, chosen(ASKED, 10), PromptAction.NOTHING),
        (APPLY, chosen(ASKED, 10), PromptAction.CHANGE),
        (ASK, chosen(ALWAYS, 10**6), PromptAction.CHANGE_AND_SAY),
        (ASK, chosen(ALWAYS, 10, tier="hbm20g"), PromptAction.ASK),
        (SHOW, chosen(ALWAYS, 10), PromptAction.NOTHING),
        (SHOW, chosen(ALWAYS, 10**6), PromptAction.TELL),
        (ASK, chosen(NEVER, 10**8), PromptAction.NOTHING),
        (APPLY, chosen(NEVER, 10**8), PromptAction.NOTHING),
    ],
)
def test_what_happens(mode: str, earlier: Choice | None, expected: PromptAction) -> None:
    assert action(mode, proposal(), earlier, NOW_S) is expected


def test_what_cannot_be_changed_is_told_once_an_hour() -> None:
    fixed = proposal("[hbm80g*2]")
    assert action(ASK, fixed, None, NOW_S) is PromptAction.TELL
    assert action(ASK, fixed, chosen(ASKED, 10), NOW_S) is PromptAction.NOTHING
    assert action(ASK, fixed, chosen(ALWAYS, 10**6), NOW_S) is PromptAction.NOTHING
    assert action(APPLY, fixed, None, NOW_S) is PromptAction.NOTHING


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y\n", "yes"),
        ("YES\n", "yes"),
        (" a \n", ALWAYS),
        ("v\n", NEVER),
        ("never", NEVER),
        ("n\n", "no"),
        ("\n", "no"),
        ("", "no"),
        ("yy\n", "no"),
        ("\x1b[A\n", "no"),
    ],
)
def test_answers(line: str, expected: str) -> None:
    assert answer(line) == expected


def test_only_a_lasting_answer_lasts() -> None:
    now = proposal()
    assert new_choice(now, None, "yes", NOW_S).word == ASKED
    assert new_choice(now, chosen(ALWAYS), "no", NOW_S).word == ASKED
    assert new_choice(now, None, ALWAYS, NOW_S) == chosen(ALWAYS)
    assert new_choice(now, chosen(ALWAYS, 9, tier="x"), None, NOW_S) == chosen(ALWAYS, 0, tier="x")


def test_an_option_is_shown_inert() -> None:
    assert typed(Rewrite("--constraint", "gpu&hbm40g")) == '-C "gpu&hbm40g"'
    assert typed(Rewrite("--gres", "gpu:a100:2,$(id)`x`'\x1b[31m\n")) == "--gres='gpu:a100:2,$(id)`x`'\\''?[31m?'"


def test_nothing_is_changed_where_the_request_says_which_nodes_it_wants() -> None:
    found = propose(request(), advice(), is_placed=True)
    assert found is not None
    assert found.change.value == ""


GOOD = "train-bert-#\t2\talways\thbm40g\t1795256200\n"
FILES = {
    "empty": "",
    "one line": GOOD,
    "two families": GOOD + "a\t1\tnever\thbm40g\t5\n",
    "one family twice": GOOD + GOOD.replace("always", "never"),
    "cut off": GOOD + "a\t1",
    "without its last newline": GOOD[:-1],
    "another word": GOOD.replace("always", "maybe"),
    "a blank line": GOOD + "\n",
    "no number": GOOD.replace("\t2\t", "\tx\t"),
    "zero GPUs": GOOD.replace("\t2\t", "\t0\t"),
    "a key with a blank": GOOD.replace("train-bert-#", "train bert"),
    "a long key": "x" * 65 + GOOD[12:],
    "a field more": GOOD[:-1] + "\tx\n",
    "a carriage return": GOOD.replace("\n", "\r\n"),
    "control characters": "\x1b[31m" + GOOD,
    "a vertical tab": GOOD[:-1] + "\x0b" + GOOD,
    "binary": "\x00\xff" * 100,
}
USED = {"empty": 0, "one line": 1, "two families": 2, "one family twice": 1}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_breaks_the_format_is_as_if_empty(name: str) -> None:
    assert len(parse(FILES[name])) == USED.get(name, 0)
