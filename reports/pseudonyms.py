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
from telemetry.atomic import TEMPORARY
from telemetry.user_files import opened

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
        _make(path, store_root)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {error.strerror}",
            "run `almanac site-report` once as the store's owner; or show names with --names",
        ) from error
    return _read(path)


def _make(path: Path, store_root: Path) -> None:
    """Of two processes at once the first one's key stays. What root makes in the store is the store's owner's."""
    owner = store_root.stat()
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o750, exist_ok=True)
        with opened(path.parent) as folder:
            _give(folder, owner)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fchmod(file.fileno(), 0o640)
            _give(file.fileno(), owner)
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _give(handle: int, owner: os.stat_result) -> None:
    """Of a descriptor: the store's owner can put another file in the place of a name."""
    if os.geteuid() == 0:
        os.fchown(handle, owner.st_uid, owner.st_gid)


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
