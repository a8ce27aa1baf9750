"""The advice file: what is written is read back, and whatever breaks a rule is not used at all."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Priority, Tier
from almanac.errors import FileFormatError
from slurm_hooks.advice.file import MAX_BYTES, AdviceFile, Row, look_up, parse, read, render, unwritable, usable

VECTORS = Path(__file__).parents[1] / "vectors"
LOOKUPS = json.loads((VECTORS / "lookups.json").read_text())
NOW_S = LOOKUPS["now_s"]


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_vectors", VECTORS / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_vectors_are_what_their_maker_writes() -> None:
    made = maker()
    expected = {**made.good(), **made.broken(), **made.json_files()}
    found = {str(path.relative_to(VECTORS)): path.read_bytes() for path in VECTORS.rglob("*") if path.is_file()}
    assert {name for name in found if "__pycache__" not in name} == {*expected, "make.py"}
    for name, content in expected.items():
        assert found[name] == content, f"{name}: run tests/slurm_hooks/vectors/make.py"


def test_a_file_that_breaks_a_rule_is_not_used() -> None:
    broken = list((VECTORS / "broken").iterdir())
    assert len(broken) > 50
    for path in broken:
        with pytest.raises(FileFormatError):
            read(path, NOW_S)
        assert usable(path, NOW_S) is None, path


def test_a_good_file_is_read_and_written_to_the_same_bytes() -> None:
    for path in (VECTORS / "good").iterdir():
        assert render(read(path, NOW_S)) == path.read_bytes()
    assert (VECTORS / "good" / "largest").stat().st_size == MAX_BYTES


def test_look_ups_by_hand() -> None:
    """F before G before U; a name that the user's file does not know is never looked for under F in `_site`."""
    user, site = (read(VECTORS / "good" / name, NOW_S) for name in ("1000", "_site"))

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


def test_a_directory_a_fifo_and_an_unreadable_file_are_not_used_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("fifo", "folder", "loop", "absent", "fifo/below"):
        assert usable(tmp_path / name, NOW_S) is None


def test_a_file_of_50_mb_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as out:
        out.truncate(50 << 20)
    with pytest.raises(FileFormatError, match="larger than 65536"):
        read(path, NOW_S)


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
            continue
        assert render(file) == bytes(raw) or file != parse(whole, NOW_S)


KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=64).filter(
    lambda t: t != "-"
)
TEXTS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80).filter(lambda t: t != "-")
FAMILIES = st.builds(
    Row,
    st.just("F"),
    st.integers(0, 10**12 - 1),
    st.integers(0, 10**9 - 1),
    KEYS,
    st.integers(1, 999_999),
    st.none() | st.integers(0, 10**6),
    st.none() | KEYS,
    TEXTS,
    TEXTS,
)


@given(st.lists(FAMILIES, max_size=20), st.booleans(), st.sampled_from(["off", "observe", "apply"]))
def test_whatever_can_be_written_is_read_back(rows: list[Row], tell: bool, mode: str) -> None:
    tier = Tier(name="a b", capacity_mib=1, gres="a100")
    file = AdviceFile("v-1", 1, 2, mode, tell, "ask", Priority(), (tier,), tuple(rows))
    assert parse(render(file), 1) == file


@pytest.mark.parametrize("text", ["two\nlines", "tab\tbed", "é", "\x1b[0m"])
def test_what_would_break_the_format_is_never_written(text: str) -> None:
    row = Row("F", 1, 1, "key", 1, text=text)
    file = AdviceFile("v", 1, 2, "observe", False, "ask", Priority(), (), (row,))
    with pytest.raises(ValueError, match="not a line of format"):
        render(file)


def test_tier_names_that_cannot_be_written_are_found() -> None:
    good, bad = Tier(name="hbm80g", capacity_mib=1, constraint="hbm80g"), Tier(name="a;b", capacity_mib=1, gres="é")
    assert unwritable([good, bad]) == ["a;b", "é"]
    assert unwritable([good]) == []
