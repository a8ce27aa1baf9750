"""Empty stores, and fixtures of made_site.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_site import Site

from telemetry.store.store import ClusterStore, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def cluster(store: Store) -> ClusterStore:
    return store.of("c")


@pytest.fixture
def new_site(tmp_path: Path) -> Callable[[], Site]:
    """Makes empty sites."""
    numbers = count()
    return lambda: Site(tmp_path / f"site{next(numbers)}")


@pytest.fixture
def site(new_site: Callable[[], Site]) -> Site:
    return new_site()
