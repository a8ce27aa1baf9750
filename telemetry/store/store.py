"""The store: Parquet files below one root, written atomically and idempotently, read through DuckDB.

A row belongs to exactly one partition file, chosen by its time, and to exactly one key in it. Writing merges by
key, so the same rows can be written any number of times. A file is replaced by rename only, so a writer that is
killed at any moment leaves every file as it was before or as it is after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from almanac.errors import SchemaVersionError, StoreError
from almanac.plain_file import read_json, with_checksum
from telemetry.store.atomic import make_folders, write_atomically, writing
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.folder import StoreFolder
from telemetry.store.schema import SCHEMA_VERSION

_MOST_BYTES = 4096


class Store(StoreFolder):
    """A store that `open` or `create` returned."""

    @classmethod
    def create(cls, root: Path, **options: Any) -> Store:
        """Open the store of this root, made first where there is none. Raises StoreError, SchemaVersionError."""
        mark = root / "store.json"
        try:
            make_folders(root)
            is_new = not mark.exists()
        except OSError as error:
            raise StoreError(
                f"{root}: cannot be created or read: {error}", "choose a folder that you can write with --store"
            ) from error
        if is_new:
            # It is almanac's home, too, and can be a disk of its own.
            if any(not child.name.startswith(".") and child.name != "lost+found" for child in root.iterdir()):
                raise StoreError(
                    f"{root}: holds files, but no store.json", "choose an empty folder or an almanac store"
                )
            with writing(mark):
                write_atomically(mark, with_checksum(json.dumps({"schema_version": SCHEMA_VERSION})))
        return cls.open(root, **options)

    @classmethod
    def open(cls, root: Path, **options: Any) -> Store:
        """The store of this root. Raises StoreError where there is none, SchemaVersionError where it is another's."""
        try:
            version = read_json(root / "store.json", _MOST_BYTES)["schema_version"]
        except FileNotFoundError as error:
            raise StoreError(
                f"{root}: there is no store here", "run `almanac ingest` first, or choose another --store"
            ) from error
        except PermissionError as error:
            raise StoreError(f"{root}: you cannot read this store", "ask an operator of almanac") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{root}/store.json: cannot be read: {error}", "restore it, or choose another --store"
            ) from error
        if version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{root}: schema version {version!r}, this almanac reads version {SCHEMA_VERSION}",
                "use the almanac that wrote it, or ingest into a new store",
            )
        return cls(root, **options)

    def of(self, cluster: str) -> ClusterStore:
        """The tables of one cluster, which need not have any row yet."""
        return ClusterStore(self, cluster)
