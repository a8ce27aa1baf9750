"""Folders that are no store of this almanac."""

from __future__ import annotations

from pathlib import Path

import pytest

from almanac.errors import SchemaVersionError, StoreError
from telemetry.store.store import Store


def test_another_schema_version_is_refused_with_a_word(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    (store.root / "store.json").write_text('{"schema_version": 999}')
    with pytest.raises(SchemaVersionError, match="schema version 999"):
        Store.open(store.root)


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store here"):
        Store.open(tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"no store\.json"):
        Store.create(tmp_path)
