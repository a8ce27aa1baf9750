"""Published files: what one release writes, this one and its neighbors read; everything else is refused."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import FileFormatError, StoreError
from almanac.published.files import PublishedKind, usable, user_folder

NOW_S = 1_000


class Low(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    name: str
    size: int = 0


@dataclass(frozen=True)
class Whole:
    written_s: int
    expires_s: int
    mode: Literal["off", "on"] = "on"
    share: float | None = None
    is_on: bool = False
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] = (1, "a")
    span: Low | None = None
    table: Mapping[str, tuple[float, ...]] | None = None
    row: Any = None


@dataclass(frozen=True)
class NextWhole(Whole):
    """The same of the next release."""

    color: str = "red"


KIND, PACKED = PublishedKind("whole", Whole), PublishedKind("whole", Whole, is_packed=True, is_plain=False)
NEXT = PublishedKind("whole", NextWhole)
VALUE = Whole(
    NOW_S, NOW_S + 60, "off", 0.5, True, (Part("a"), Part("b", 2)), (7, "b"), Low(1.0, 2.0), {"x": (1.0,)}, {"k": [1]}
)
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126))
WHOLES = st.builds(
    Whole, st.integers(0, 2**40), st.integers(0, 2**40), st.sampled_from(["off", "on"]),
    st.none() | st.floats(-1e9, 1e9), st.booleans(), st.lists(st.builds(Part, TEXT, st.integers(-9, 9))).map(tuple),
    st.tuples(st.integers(-9, 9), TEXT), st.none() | st.builds(Low, st.floats(0, 1), st.floats(0, 1)),
    st.none() | st.dictionaries(TEXT, st.lists(st.floats(0, 1)).map(tuple)), st.none() | st.booleans(),
)  # fmt: skip


@given(WHOLES)
def test_values_come_back(value: Whole) -> None:
    for kind in (KIND, PACKED):
        assert kind.parse(kind.render(value)).value == value


def test_a_file_names_its_kind_and_leaves_out_what_is_empty() -> None:
    assert (
        KIND.render(Whole(1, 2))
        == b'{"almanac":"whole","format":1,"written_s":1,"expires_s":2,"mode":"on","pair":[1,"a"]}\n'
    )


def test_neighbour_releases_read_each_other() -> None:
    found = KIND.parse(NEXT.render(NextWhole(1, 2, color="blue")))
    assert found.value == Whole(1, 2)
    assert found.unknown == ("color",)
    newer = NEXT.parse(KIND.render(Whole(1, 2)))
    assert newer.value == NextWhole(1, 2)
    assert newer.unknown == ()


def test_a_version_that_would_be_misunderstood_is_refused() -> None:
    with pytest.raises(FileFormatError, match="format 2, expected at most 1") as raised:
        KIND.parse(replace(KIND, version=2).render(VALUE))
    assert "release that publishes here" in str(raised.value.hint)


@pytest.mark.parametrize(
    "change",
    [
        {"almanac": "other"}, {"almanac": None}, {"format": True}, {"format": "1"}, {"written_s": 1.0},
        {"written_s": True}, {"written_s": 2**63}, {"share": "x"}, {"share": 1e300}, {"is_on": 1}, {"mode": "apply"},
        {"mode": []}, {"parts": {}}, {"parts": [1]}, {"parts": [{"size": 1}]}, {"parts": [{"name": "\x1b[2J"}]},
        {"parts": [{"name": "a\n"}]}, {"parts": [{"name": "\u202e"}]}, {"pair": [1]}, {"span": [1, 2, 3]},
        {"table": []}, {"table": {"\x00": []}}, {"table": {"x": [None]}},
    ],
)  # fmt: skip
def test_other_values_are_refused(change: dict[str, Any]) -> None:
    document = {**json.loads(KIND.render(VALUE)), **change}
    with pytest.raises(FileFormatError):
        KIND.parse(json.dumps(document).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b"[" * 60_000, b'{"almanac":"whole","format":1}'])
def test_what_is_no_such_object_is_refused(content: bytes) -> None:
    for kind, packed in ((KIND, content), (PACKED, gzip.compress(content)), (PACKED, content)):
        with pytest.raises(FileFormatError):
            kind.parse(packed)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    with pytest.raises(FileFormatError):
        KIND.parse(KIND.render(VALUE).replace(b"0.5", number.encode()))


def test_a_bomb_and_a_cut_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PACKED.render(VALUE)
    for content in (whole[:-9], whole + b"x", whole[:-8] + bytes(8)):
        with pytest.raises(FileFormatError):
            PACKED.parse(content)
    monkeypatch.setattr("almanac.published.files.UNPACKED_BYTES", 60)
    with pytest.raises(FileFormatError, match="too large"):
        PACKED.parse(whole)


def test_nothing_is_written_that_no_reader_takes() -> None:
    changes: tuple[dict[str, Any], ...]
    changes = ({"share": math.nan}, {"parts": (Part("\x07"),)}, {"row": "x" * 65_536})
    for change in changes:
        with pytest.raises(ValueError):
            KIND.render(replace(VALUE, **change))


def _put(root: Path, content: bytes, name: str = "whole") -> Path:
    path = user_folder(root, str(os.geteuid())) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o440)
    return path


def test_only_what_its_reader_may_believe_is_read(tmp_path: Path) -> None:
    me = os.geteuid()
    with pytest.raises(FileNotFoundError):
        KIND.read(tmp_path, str(me), me)
    path = _put(tmp_path, KIND.render(VALUE))
    assert KIND.read(tmp_path, str(me), me).value == VALUE
    path.chmod(0o620)
    with pytest.raises(FileFormatError, match=f"{path}: other users can write"):
        KIND.read(tmp_path, str(me), me)
    path.rename(path.with_name("other"))
    path.symlink_to("other")
    with pytest.raises(StoreError, match="cannot be read"):
        KIND.read(tmp_path, str(me), me)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match="not a regular file"):
        KIND.read(tmp_path, str(me), me)


@pytest.mark.parametrize(
    ("written_s", "expires_s", "is_used"),
    [
        (NOW_S, NOW_S + 1, True),
        (NOW_S, NOW_S, False),
        (NOW_S + 300, NOW_S + 900, True),
        (NOW_S + 301, NOW_S + 900, False),
    ],
)
def test_a_file_is_used_while_it_is_in_force(tmp_path: Path, written_s: int, expires_s: int, is_used: bool) -> None:
    value = Whole(written_s, expires_s)
    assert usable(KIND, tmp_path, str(os.geteuid()), NOW_S) is None
    path = _put(tmp_path, KIND.render(value))
    assert usable(KIND, tmp_path, str(os.geteuid()), NOW_S) == (value if is_used else None)
    path.chmod(0o660)
    assert usable(KIND, tmp_path, str(os.geteuid()), NOW_S) is None
