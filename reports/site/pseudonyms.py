"""Pseudonyms of users: the same in every report of a site, and different at every site."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from almanac.errors import StoreError
from almanac.plain_file import read_plain
from telemetry.store.atomic import TEMPORARY, hand_over, make_inner_folder

KEY_BYTES = 32


def site_key(store_root: Path) -> bytes:
    """The site's secret key, made at its first use. Without a key, anyone could find a name by trying all users.

    The file is `reports/pseudonyms.key` in the store. Everyone with access to the store can read it. Raises StoreError.
    """
    path = store_root / "reports" / "pseudonyms.key"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        _make(path)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}",
            "run `almanac site-report` once as the store's owner, or show names with --names",
        ) from error
    return _read(path)


def _make(path: Path) -> None:
    """Write a new key. If two processes do so at once, the first key stays."""
    make_inner_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fchmod(file.fileno(), 0o640)
            hand_over(file.fileno(), path.parent)
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """Raises FileNotFoundError, StoreError."""
    try:
        key = bytes.fromhex(read_plain(path, 1000, os.O_NOFOLLOW).decode("ascii"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", "ask an operator, or show names with --names") from error
    if len(key) < KEY_BYTES:
        raise StoreError(f"{path}: holds {len(key)} bytes, expected {KEY_BYTES}", "remove it: pseudonyms then change")
    return key


def pseudonym(name: str, key: bytes) -> str:
    """A user's pseudonym, such as "user-3f9a2c41". It depends on the name and the key only."""
    return f"user-{hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:8]}"
