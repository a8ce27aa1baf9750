"""One DuckDB for all connections of a process, each with a catalog of its own: to start one takes 10 ms of CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import duckdb

SPILLS_MIB = 512
"""A connection that may take less starts a DuckDB of its own, and so does one without a limit."""
_start, _numbers = duckdb.connect, itertools.count()
_started: dict[tuple[int, int], duckdb.DuckDBPyConnection] = {}


@contextlib.contextmanager
def connect(config: dict[str, Any]) -> Iterator[duckdb.DuckDBPyConnection]:
    """Stand in for duckdb.connect."""
    limit, key = config.get("memory_limit", "0MiB"), (os.getpid(), config["threads"])
    if int(limit.removesuffix("MiB")) < SPILLS_MIB:
        with _start(config=config) as own:
            yield own
        return
    base = _started.get(key) or _started.setdefault(key, _start(config={**config, "temp_directory": ""}))
    name = f"own{next(_numbers)}"
    with base.cursor() as db:
        db.execute(f"SET memory_limit = '{limit}'; ATTACH ':memory:' AS {name}; USE {name}").fetchall()
        yield db
    base.execute(f"DETACH {name}").fetchall()
