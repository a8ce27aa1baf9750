"""How much memory this process holds, and how much of a limit that leaves to DuckDB."""

from __future__ import annotations

import os
from pathlib import Path

LEAST_MIB = 64
"""DuckDB gets at least this much, because it can hardly read a file with less."""
RESERVED_MIB = 64
"""Of the limit: for modules that are loaded later, and for memory that DuckDB uses without counting it."""


def resident_mib() -> int:
    """Memory of this process, MiB; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def duckdb_share_mib(limit_mib: int) -> int:
    """What a limit on the process leaves to DuckDB, at least a quarter: DuckDB can spill to disk, other code cannot."""
    return max(limit_mib - resident_mib() - RESERVED_MIB, limit_mib // 4, LEAST_MIB)
