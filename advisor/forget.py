"""What the trained versions keep of one user, and how it is removed, for `almanac forget`.

The trees and margins hold no names. A version can hold the user's account, if nobody else has it, the numbers of
their newest jobs, and whatever a service of the site's own learned.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from advisor.version_folders import description, version_names
from almanac.errors import StoreError
from almanac.kept import Kept
from almanac.plain_file import read_json, read_plain
from telemetry.store.atomic import write_atomically

REMOVED = "(removed)"
"""Stands for an account, so that the codes of the others stay the same. No account has such a name."""
_HINT = "remove this version, then run `almanac train`"


def model_places(
    models_dir: Path, user: str, runs: Collection[tuple[int, int]], accounts: Collection[str]
) -> Iterator[Kept]:
    """runs: job id and submission of the user's runs. accounts: those that nobody else has."""
    metas = [models_dir / "duration" / name / "meta.json" for name in version_names(models_dir / "duration")]
    changed = [path for path in metas if _scrubbed(path, runs, accounts) is not None]
    remove = functools.partial(_scrub, metas, runs, accounts)
    yield Kept("trained models", len(changed), "file", remove)
    folders = [models_dir / "services" / name for name in version_names(models_dir / "services")]
    naming = [folder for folder in folders if _names(folder, user)]
    yield Kept("models of own services", len(naming), "folder", functools.partial(_remove, naming))


def _scrub(metas: Collection[Path], runs: Collection[tuple[int, int]], accounts: Collection[str]) -> None:
    for path in metas:
        meta = _scrubbed(path, runs, accounts)
        if meta is not None:
            write_atomically(path, description(meta).encode("utf-8"), is_handed_over=True)


def _scrubbed(path: Path, runs: Collection[tuple[int, int]], accounts: Collection[str]) -> Mapping[str, Any] | None:
    """The description without the user; None if it does not mention them. Raises StoreError."""
    try:
        meta = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _HINT) from error
    model = meta.get("model") if isinstance(meta, dict) else None
    if not isinstance(model, dict):
        return None
    try:
        known = model.get("vocabularies", {}).get("account", [])
        unseen = model.get("unseen", [])
        named = [REMOVED if account in accounts else account for account in known]
        kept = [each for each in unseen if (each[0], each[1]) not in runs]
    except (AttributeError, TypeError, IndexError, KeyError) as error:
        raise StoreError(f"{path}: has a bad field: {error!r}", _HINT) from error
    if named == known and len(kept) == len(unseen):
        return None
    vocabularies = {**model["vocabularies"], "account": named} if named != known else model["vocabularies"]
    return {**meta, "model": {**model, "vocabularies": vocabularies, "unseen": kept}}


def _names(folder: Path, user: str) -> bool:
    """Whether the name stands in a file of the folder, as a word of its own."""
    spellings = {user, json.dumps(user)[1:-1]}
    word = re.compile("|".join(rf"(?<![\w.-]){re.escape(each)}(?![\w-])" for each in spellings))
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return any(word.search(read_plain(path).decode("utf-8", "replace")) for path in files)


def _remove(folders: Collection[Path]) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
