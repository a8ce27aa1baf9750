"""What is said of a submission and when; and that proposal.lua says the same in the same cases."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lua_runner import Lua, literal
from profiles import examples

from almanac.config import Priority, Tier
from almanac.records import Request
from almanac.submit_config import SubmitMode
from almanac.tiers import Rewrite
from slurm_hooks.advice.file import AdviceFile, Row
from slurm_hooks.submit.choices import Choice, ChoiceWord, parse, replaced
from slurm_hooks.submit.proposal import (
    PromptAction,
    Proposal,
    action,
    always_said,
    answer,
    checked,
    message,
    new_choice,
    propose,
    question,
    typed,
)

MODES = OFF, SHOW, ASK, APPLY = get_args(SubmitMode)
ASKED, ALWAYS, NEVER = get_args(ChoiceWord)
NOW_S = 1_795_256_200
HBM40, HBM80 = (
    Tier(name="hbm40g", capacity_mib=40960, constraint="hbm40g"),
    Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),
)
TEXT = (
    'your last 14 runs of "train-bert" peaked at 21.3 GiB per GPU; about 1 in 100 such jobs needs more than 24.8 GiB.'
)
ROW = Row("F", 3600, 6397, "train-bert-#", 2, 25395, "hbm40g", "hbm80g=3 h 10 min;hbm40g=12 min", TEXT)


def advice(*rows: Row, tiers: tuple[Tier, ...] = (HBM40, HBM80)) -> AdviceFile:
    return AdviceFile("v", NOW_S - 60, NOW_S + 60, "observe", False, ASK, Priority(), tiers, rows or (ROW,))


def request(constraints: str = "gpu&hbm80g", **more: Any) -> Request:
    return Request("alice", **{"job_name": "train-BERT-7", "constraints": constraints, "gpu_count": 2, **more})


def proposal(constraints: str = "gpu&hbm80g", row: Row = ROW) -> Proposal:
    found = propose(request(constraints), advice(row))
    assert found is not None
    return found


def test_the_message_of_the_issue() -> None:
    assert message(proposal()) + question(proposal()) == (
        'almanac: hbm40g is enough: your last 14 runs of "train-bert" peaked at 21.3 GiB\n'
        "         per GPU; about 1 in 100 such jobs needs more than 24.8 GiB.\n"
        "         Expected wait: hbm80g 3 h 10 min, hbm40g 12 min.\n"
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
def test_a_change_is_offered_where_it_can_be_made(asked: Request, said: str) -> None:
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
def test_nothing_is_said(asked: Request) -> None:
    assert propose(asked, advice()) is None


def test_rows_without_a_tier_say_nothing() -> None:
    no_tier = dataclasses.replace(ROW, tier=None)
    everybody = Row("U", 3600, 0)
    assert propose(request(), advice(no_tier)) is None
    assert propose(request(), advice(everybody)) is None
    assert propose(request(), advice(tiers=())) is None


def test_a_larger_tier_is_proposed_with_the_reason() -> None:
    row = dataclasses.replace(ROW, tier="hbm80g", waits="", text="your runs peak at 61.0 GiB.")
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
    assert shown.endswith(said or "hbm40g 12 min.")
    assert action(APPLY, found, None, NOW_S) is (PromptAction.CHANGE if value else PromptAction.NOTHING)
    assert action(ASK, found, None, NOW_S) is (PromptAction.ASK if value else PromptAction.TELL)


def test_lines_fit_80_columns_and_keep_numbers_with_their_units() -> None:
    for runs in range(14, 10**8, 9_999_937):
        row = dataclasses.replace(ROW, text=f"your last {runs} {TEXT.partition(' 14 ')[2]}")
        lines = (message(checked(proposal(row=row), None)) + question(proposal(row=row))).split("\n")
        assert max(map(len, lines)) <= 80
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


KINDS = ("constraint", "gres", "partition")
NAMES = st.sampled_from(["a", "b", "ab"])
TIERS = st.lists(st.tuples(NAMES, st.sampled_from(KINDS), NAMES, st.sampled_from([10, 20])), max_size=3, unique=True)
WAITS = st.sampled_from(["", "a=3 h 10 min", "a=3 h 10 min;b=12 min"])
REQUESTS = st.tuples(
    st.sampled_from(["", "a", "b&x", "a|b", "a&b", "[a*2]", "x,%a"]),
    st.sampled_from(["", "gpu:2", "gpu:a:2", "nvme,gpu:b:1"]),
    st.sampled_from(["", "a", "b", "h"]),
    st.sampled_from(["", "a", "a,b", "x"]),
    st.booleans(),
)
CHOICES = st.none() | st.tuples(st.sampled_from([ASKED, ALWAYS, NEVER]), NAMES, st.sampled_from([0, 10, 3600, -9]))
OFFERED = st.sampled_from([True, False, None])
CASES = st.tuples(
    TIERS, WAITS, REQUESTS, CHOICES, st.sampled_from(MODES), st.sampled_from(["x", "word " * 40]), OFFERED
)

LUA = """
local proposal = dofile(dir .. "proposal.lua")
local function try(request, row, advice, choice, mode, word, offered)
  local found = proposal.propose(tiers, request, row, advice)
  if not found then return all(false) end
  if offered == "?" then offered = nil end
  proposal.checked(found, offered)
  local new = proposal.new_choice(found, choice, word, 1795256200)
  all(found.tier.name, found.option or "", found.value or "", proposal.action(mode, found, choice, 1795256200),
    proposal.message(found), found.value and proposal.question(found) or "",
    found.value and proposal.always_said(found) or "", proposal.choices_text({choice}, new))
end
"""


def as_lua(tier: Tier) -> dict[str, Any]:
    kind = next(kind for kind in KINDS if getattr(tier, kind))
    return {"name": tier.name, "capacity_mib": tier.capacity_mib, "kind": kind, kind: getattr(tier, kind)}


def expected_of(found: Proposal | None, choice: Choice | None, mode: str, word: str | None) -> list[Any]:
    if found is None:
        return [False]
    can = bool(found.change.value)
    kept = replaced([choice] if choice else [], new_choice(found, choice, word, NOW_S))
    lines = "".join(f"{c.key}\t{c.gpus}\t{c.word}\t{c.tier}\t{c.time_s}\n" for c in kept)
    return [
        found.tier.name,
        found.change.option,
        found.change.value,
        action(mode, found, choice, NOW_S).value,
        message(found),
        question(found) if can else "",
        always_said(found) if can else "",
        lines,
    ]


@given(cases=st.lists(st.tuples(CASES, st.sampled_from([None, "yes", "no", ALWAYS, NEVER])), min_size=1, max_size=25))
@examples(0.4)
def test_lua_does_what_python_does(lua: Lua, cases: list[Any]) -> None:
    code, expected = LUA, []
    for (tiers, waits, asking, choice, mode, text, offered), word in cases:
        known = tuple(Tier(name=n, capacity_mib=size, **{kind: selector}) for n, kind, selector, size in tiers)
        row = dataclasses.replace(ROW, tier="a", waits=waits, text=text.strip())
        asked = Request("alice", "train-bert-1", gpu_count=2, constraints=asking[0], gres=asking[1],
                        gpu_type=asking[2], partition=asking[3])  # fmt: skip
        earlier = chosen(choice[0], choice[2], tier=choice[1]) if choice else None
        in_lua = {
            "request": {"constraints": asking[0], "gres": asking[1], "gpu_type": asking[2], "partition": asking[3],
                        "is_placed": asking[4]},
            "row": {"kind": "F", "key": row.key, "gpus": 2, "tier": "a", "text": row.text, "waits": waits or None},
            "advice": {"tiers": [as_lua(tier) for tier in known]},
            "choice": earlier and {"key": earlier.key, "gpus": 2, "word": earlier.word, "tier": earlier.tier,
                                   "time": earlier.time_s},
        }  # fmt: skip
        code += f"\ntry({', '.join(literal(part) for part in in_lua.values())}, {literal(mode)}, {literal(word)}"
        code += f", {literal('?' if offered is None else offered)})"
        found = propose(asked, advice(row, tiers=known), asking[4])
        expected.append(expected_of(found and checked(found, offered), earlier, mode, word))
    assert lua.run(code) == expected


@given(lines=st.lists(st.text(alphabet="yaYnev \t\n\x1b%", max_size=8), min_size=1, max_size=30))
@examples(0.2)
def test_lua_understands_the_same_answers(lua: Lua, lines: list[str]) -> None:
    code = 'local proposal = dofile(dir .. "proposal.lua")\n'
    code += "\n".join(f"all(proposal.answer({literal(line)}))" for line in lines)
    assert lua.run(code) == [[answer(line)] for line in lines]


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
def test_a_file_that_breaks_the_format_is_as_if_empty(name: str, lua: Lua) -> None:
    found = parse(FILES[name])
    assert len(found) == USED.get(name, 0)
    code = 'local proposal = dofile(dir .. "proposal.lua")\n'
    code += f"local found = proposal.parse_choices({literal(FILES[name].encode('latin-1'))})\n"
    code += "all(#found, found[1] and found[1].word)"
    assert lua.run(code) == [[len(found), found[0].word if found else None]]
