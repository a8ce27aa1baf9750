"""Which cluster of a store a command or a program means."""

from __future__ import annotations

from almanac.errors import ConfigError, StoreError
from telemetry.store.store import Store


def cluster_of(store: Store, named: str = "") -> str:
    """The named cluster, else the store's only one.

    Raises ConfigError where the store holds several, StoreError where it holds none.
    """
    if named:
        return named
    known = store.clusters()
    if not known:
        raise StoreError(
            f"{store.root}: the store holds no jobs yet", "run `almanac ingest` first, or choose another --store"
        )
    if len(known) > 1:
        raise ConfigError(f"the store holds several clusters: {', '.join(known)}", "choose one with --cluster")
    return known[0]
