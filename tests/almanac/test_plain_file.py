"""Files are read without waiting, within bounds, and their JSON with one kind of error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from almanac.plain_file import DEEPEST, parse_json, read_json, read_plain, with_checksum


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.write_bytes(b"1" * 101)


@pytest.mark.parametrize("make", [_fifo, _folder, _device, _large])
def test_what_is_no_small_regular_file_is_refused_at_once(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|larger than 100 bytes|directory"):
        read_plain(tmp_path / "file", 100)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000,
     b"[" * (DEEPEST + 2) + b"]" * (DEEPEST + 2), b'{"a":' * 99 + b"1" + b"}" * 99, b"\xff{}",
     b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_every_bad_content_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


def test_brackets_within_a_text_are_no_nesting() -> None:
    assert parse_json(json.dumps({"hosts": "[" * 1000}).encode()) == {"hosts": "[" * 1000}


@pytest.mark.parametrize(
    "content", [{}, {"until_s": 1}, {"a": {"sum": "0123456789abcdef"}}, {"sum": "0123456789abcdef"}]
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_checksum_is_not_part_of_the_content(content: dict[str, object], indent: int | None) -> None:
    text = with_checksum(json.dumps(content, indent=indent))
    assert parse_json(text) == content
    assert isinstance(json.loads(text), dict)


def test_every_flipped_bit_of_a_text_with_a_checksum_is_seen_or_changes_no_value() -> None:
    content = {"last": 7, "days": {"2026-11-27": 5}}
    text = with_checksum(json.dumps(content))
    for place in range(len(text) * 8):
        spoiled = bytearray(text)
        spoiled[place // 8] ^= 1 << place % 8
        try:
            found = parse_json(bytes(spoiled))
        except ValueError:
            continue
        assert content.items() <= found.items()


def test_a_text_without_a_checksum_is_believed() -> None:
    assert parse_json(b'{"until_s": 1}\n') == {"until_s": 1}
