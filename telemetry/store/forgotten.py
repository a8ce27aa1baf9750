"""The list of people whom `almanac forget` removed. Their records of that time are not stored again.

<store>/forgotten.json holds a random key and, for each person, the HMAC-SHA-256 of the name and two times. It does not
hold the name. Anyone who can read the store can test whether a name that they know is on the list.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from almanac.atomic import write_atomically, writing
from almanac.errors import StoreError
from almanac.files import read_json, with_checksum

_NAME = "forgotten.json"
TIME_COLUMNS = {"jobs": "submit_s", "advice": "published_s"}
"""Tables with a user in each row, and when the row began."""


@dataclass(frozen=True)
class Forgetting:
    """Rows of a person that began before `before_s` are left out. done_s: None while something may be left."""

    before_s: int
    done_s: int | None = None


@dataclass(frozen=True)
class Forgotten:
    """The list. people: by the digest of the name."""

    key: bytes = b""
    people: Mapping[str, Forgetting] = field(default_factory=dict)

    def digest(self, user: str) -> str:
        return hmac.new(self.key, user.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    def without(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows of a table that are stored."""
        time = TIME_COLUMNS.get(table)
        if not self.people or time is None or not rows.num_rows:
            return rows
        before = {user: self._before_s(user) for user in pc.unique(rows["user"].cast(pa.string())).to_pylist()}
        if not any(before.values()):
            return rows
        columns: list[list[Any]] = [rows[name].to_pylist() for name in ("user", time)]
        return rows.filter(pa.array([start_s >= before[user] for user, start_s in zip(*columns, strict=True)]))

    def _before_s(self, user: str | None) -> int:
        known = self.people.get(self.digest(user)) if user else None
        return known.before_s if known else 0

    def with_person(self, user: str, forgetting: Forgetting) -> Forgotten:
        made = self if self.key else Forgotten(secrets.token_bytes(32))
        return Forgotten(made.key, {**made.people, made.digest(user): forgetting})


def read_forgotten(root: Path) -> Forgotten:
    """The list of a store; an empty one if nobody was forgotten. Raises StoreError."""
    path = root / _NAME
    try:
        return _parse(read_json(path))
    except FileNotFoundError:
        return Forgotten()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path}: cannot be read: {error}", "restore it from a backup: without it, forgotten people come back"
        ) from error


def write_forgotten(root: Path, content: Forgotten) -> None:
    """Replace the list of a store. To be called under the store's lock. Raises StoreError."""
    people = {digest: vars(each) for digest, each in sorted(content.people.items())}
    text = json.dumps({"key": content.key.hex(), "people": people}, indent=1)
    with writing(root / _NAME):
        write_atomically(root / _NAME, with_checksum(text), is_handed_over=True)


def _parse(content: Any) -> Forgotten:
    people = {
        str(digest): Forgetting(int(each["before_s"]), None if each["done_s"] is None else int(each["done_s"]))
        for digest, each in content["people"].items()
    }
    key = bytes.fromhex(content["key"])
    if len(key) < 32:
        raise ValueError(f"its key has {len(key)} bytes, expected 32")
    return Forgotten(key, people)
