"""Names that stand for users in pages that are passed on: the same in every page of a site, and of no other."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from almanac.errors import StoreError
from telemetry.store.atomic import TEMPORARY, hand_over, make_inner_folder

KEY_BYTES = 32


def site_key(store_root: Path) -> bytes:
    """The site's secret, made at its first use: without it a name could be found by trying all users.

    Lies at `reports/pseudonyms.key` below the store's root, readable by who may read the store. Raises StoreError.
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
            "run `almanac site-report` once as the store's owner; or show names with --names",
        ) from error
    return _read(path)


def _make(path: Path) -> None:
    """Of two processes at once the first one's key stays."""
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
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            key = bytes.fromhex(file.read(1000).decode("ascii"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", "ask an operator, or show names with --names") from error
    if len(key) < KEY_BYTES:
        raise StoreError(f"{path}: holds {len(key)} bytes, expected {KEY_BYTES}", "remove it: pseudonyms then change")
    return key


def pseudonym(name: str, key: bytes) -> str:
    """ "user-3f9a2c41": the same for a name as long as the key is."""
    return f"user-{hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:8]}"
