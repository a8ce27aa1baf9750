"""The memory limit holds for the process, not only for DuckDB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.store import process_memory
from telemetry.store.process_memory import LEAST_MIB, RESERVED_MIB, duckdb_share_mib, resident_mib
from telemetry.store.store import Store

LIMIT_MIB, HELD_MIB = 384, 160
PROGRAM = f"""
import sys
from pathlib import Path
import numpy as np
from telemetry.store.store import Store
held = np.ones({HELD_MIB} * 2**17)
with Store.open(Path(sys.argv[1]), memory_limit_mib={LIMIT_MIB}, threads=2).connect() as db:
    sql = "CREATE TEMP TABLE t AS SELECT hash(range)::VARCHAR || repeat('x', 80) s FROM range(1_500_000)"
    db.execute(sql).fetchall()
    db.execute("SELECT max(s) FROM (FROM t ORDER BY s LIMIT 1_400_000)").fetchall()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_arrays_and_duckdb_together_stay_within_a_quarter_above_the_limit(tmp_path: Path) -> None:
    """The query alone takes more than the limit, so DuckDB has to spill."""
    Store.create(tmp_path / "store")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert HELD_MIB < int(done.stdout.split()[-1]) / 1024 < 1.25 * LIMIT_MIB


def test_duckdb_gets_what_the_process_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "resident_mib", lambda: 300)
    assert duckdb_share_mib(2048) == 2048 - 300 - RESERVED_MIB
    assert duckdb_share_mib(400) == 100, "at least a quarter: a process that holds much must still read its store"
    assert duckdb_share_mib(64) == LEAST_MIB


def test_a_connection_has_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "resident_mib", lambda: 1000)
    with Store.create(tmp_path / "store", memory_limit_mib=1512 + RESERVED_MIB).connect() as db:
        assert db.execute("SELECT current_setting('memory_limit')").fetchall() == [("512.0 MiB",)]


def test_the_memory_of_this_process_is_known_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10 < resident_mib() < 100_000
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert resident_mib() == 0
