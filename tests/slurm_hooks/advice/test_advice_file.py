"""The advice file: what is written is read back, and whatever breaks a rule is not used at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from pathlib import Path

import pytest
from advice_lines import parse, usable
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Priority, Tier
from almanac.errors import FileFormatError
from almanac.records import JobRequest
from almanac.tiers import requested_tier, rewrite
from slurm_hooks.advice.file import ADVICE, AdviceFile, AdviceRow, look_up, unwritable
from slurm_hooks.advice.sched import MAX_BYTES, SchedHead, head_of, render, row_line

VECTORS = Path(__file__).parents[1] / "vectors"
LOOKUPS = json.loads((VECTORS / "lookups.json").read_text())
NOW_S = LOOKUPS["now_s"]


def test_the_recorded_look_ups() -> None:
    """Lua finds the same. The path of a file is under "user" and "site"; "" for none."""
    files = {str(path.relative_to(VECTORS)): usable(path, NOW_S) for path in VECTORS.glob("*/*")} | {"": None}
    for case in LOOKUPS["lookups"]:
        user, site = files[case["user"]], files[case["site"]]
        found = look_up(user, site, case["key"], case["gpus"])
        shown = None
        if found is not None:
            file = {name: getattr(found.file, name) for name in ("version", "mode", "tell", "prompt")}
            row = {**dataclasses.asdict(found.row), "site_factor": found.site_factor}
            del row["why_not"], row["gains"], row["checkpoint"], row["pilot"]  # hooks do not read them
            shown = {"from": "user" if found.file is user else "site", **file, **row}
        assert shown == case["found"], case


def test_the_recorded_rewrites() -> None:
    """Lua makes the same. A case is a request, the tiers, and the tier advised."""
    for case in json.loads((VECTORS / "rewrites.json").read_text()):
        tiers = tuple(
            Tier(name=tier["name"], capacity_mib=tier["capacity_mib"], **{tier["kind"]: tier["selector"]})
            for tier in case["tiers"]
        )
        request = JobRequest(
            "ann", constraints=case["constraint"], partition=case["partition"], gres=case["gres"],
            gpu_options=tuple(map(tuple, case.get("gpu_options", []))), gpu_type=case["gpu_type"],
            gpu_count=case.get("gpu_count", 2), may_use_more=case.get("may_use_more", False),
        )  # fmt: skip
        asked, advised = requested_tier(request, tiers), next(tier for tier in tiers if tier.name == case["advised"])
        how = rewrite(request, tiers, advised)
        assert (asked.name if asked else None) == case["asked"], case
        assert (bool(how.option) and asked != advised) == case["offer"], case
        if case["offer"]:
            assert (how.option, how.value) == (case["option"], case["value"]), case


def test_a_file_that_breaks_a_rule_is_not_used() -> None:
    broken = list((VECTORS / "broken").iterdir())
    assert len(broken) > 50
    for path in broken:
        with pytest.raises(FileFormatError):
            parse(path.read_bytes(), NOW_S)
        assert usable(path, NOW_S) is None, path


def test_a_good_file_is_read_and_written_to_the_same_bytes() -> None:
    for path in (VECTORS / "good").iterdir():
        assert render(parse(path.read_bytes(), NOW_S)) == path.read_bytes()
    assert (VECTORS / "good" / "largest").stat().st_size == MAX_BYTES


def test_look_ups_by_hand() -> None:
    """F before G before U; a name that the user's file does not know is never looked for under F in `_site`."""
    user, site = (parse((VECTORS / "good" / name).read_bytes(), NOW_S) for name in ("1000", "_site"))

    def kind(of: AdviceFile | None, key: str, gpus: int, last: AdviceFile | None = site) -> tuple[str, int] | None:
        found = look_up(of, last, key, gpus)
        return None if found is None else (found.row.kind, found.site_factor)

    assert kind(user, "train-bert-#", 4) == ("F", 6397)
    assert kind(user, "unknown", 16) == ("G", 4317)
    # U: round(1000 ln(8640000 / (5400 x 3))) + 250 = 6279 + 250
    assert kind(user, "unknown", 3) == ("U", 6529)
    assert kind(None, "train-bert-#", 1) == ("G", 8189)
    assert kind(None, "train-bert-#", 1, user) == ("G", 8476)
    assert kind(dataclasses.replace(user, rows=()), "train-bert-#", 1) == ("G", 8189)
    assert kind(None, "x", 1, None) is None
    assert kind(user, "train-bert-#", 0) is None


def test_no_damage_makes_a_reader_raise_anything_else() -> None:
    whole = (VECTORS / "good" / "1000").read_bytes()
    rng = random.Random(1)
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(raw))
            match rng.randrange(3):
                case 0:
                    raw[place] = rng.randrange(256)
                case 1:
                    del raw[place]
                case 2:
                    raw[place:place] = bytes([rng.randrange(256)])
        try:
            file = parse(bytes(raw), NOW_S)
        except FileFormatError:
            with contextlib.suppress(FileFormatError):
                head_of(bytes(raw))
            continue
        assert head_of(bytes(raw)).expires_s == file.expires_s
        assert render(file) == bytes(raw) or file != parse(whole, NOW_S)


KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=64).filter(
    lambda t: t != "-"
)
TEXTS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80).filter(lambda t: t != "-")
FAMILIES = st.builds(
    AdviceRow,
    st.just("F"),
    st.integers(0, 10**12 - 1),
    st.integers(0, 10**9 - 1),
    KEYS,
    st.integers(1, 999_999),
    st.none() | st.integers(0, 10**6),
    st.none() | KEYS,
    st.just(""),
    TEXTS,
)


@given(st.lists(FAMILIES, max_size=20), st.booleans(), st.sampled_from(["off", "observe", "apply"]))
def test_whatever_can_be_written_is_read_back(rows: list[AdviceRow], tell: bool, mode: str) -> None:
    tier = Tier(name="a b", capacity_mib=1, gres="a100")
    file = AdviceFile("v-1", 1, 2, mode, tell, "ask", Priority(), (tier,), tuple(rows))
    assert parse(render(file), 1) == ADVICE.parse(ADVICE.render(file)).value == file
    assert head_of(render(file)) == SchedHead(1, 2, mode)


@pytest.mark.parametrize("text", ["two\nlines", "tab\tbed", "é", "\x1b[0m"])
def test_what_would_break_the_format_is_never_written(text: str) -> None:
    row = AdviceRow("F", 1, 1, "key", 1, text=text)
    file = AdviceFile("v", 1, 2, "observe", False, "ask", Priority(), (), (row,))
    with pytest.raises(ValueError, match="not a line of format"):
        render(file)


def test_tier_names_that_cannot_be_written_are_found() -> None:
    good, bad = Tier(name="hbm80g", capacity_mib=1, constraint="hbm80g"), Tier(name="a;b", capacity_mib=1, gres="é")
    assert unwritable([good, bad]) == ["a;b", "é"]
    assert unwritable([good]) == []


def test_neither_release_takes_the_waits_of_the_other_for_gains() -> None:
    row = AdviceRow("F", 60, 1, "bert", 4, tier="hbm40g", gains="hbm80g=40 min;hbm141g=3 h", text="It ran.")
    file = AdviceFile("v", 1, 2, "observe", True, "ask", Priority(), (), (row,))
    plain = json.loads(ADVICE.render(file))
    assert "waits" not in plain["rows"][0]
    assert row_line(row).split("\t")[-2:] == [
        "-",
        "It ran. It starts about 40 min earlier than with hbm80g, about 3 h earlier than with hbm141g "
        "(half of such jobs did).",
    ]
    del plain["rows"][0]["gains"]
    plain["rows"][0]["waits"] = "hbm40g=12 min;hbm80g=3 h 10 min"
    (old,) = ADVICE.parse(json.dumps(plain).encode()).value.rows
    assert (old.earlier, old.text) == ({}, "It ran.")
