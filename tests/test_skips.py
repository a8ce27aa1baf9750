"""Whoever skips a test is named, and under ALMANAC_REQUIRE_CLUSTER=1 it fails; in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="by a mark")
def test_mark(): pass

def test_call():
    pytest.skip("by a call")

@pytest.fixture
def lacking():
    pytest.skip("by a fixture")

def test_fixture(lacking): pass

def test_trace(trace): trace("none")

@pytest.mark.xfail(reason="known")
def test_xfail(): raise ValueError

def test_passes(): pass
"""


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize("is_required", [False, True])
def test_skips_are_named_and_refused_where_nothing_may_be_skipped(
    tmp_path: Path, processes: str, is_required: bool
) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    argv = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", processes, "-ra", "-p", "no:cacheprovider", "."]
    env = os.environ | {
        "PYTHONPATH": str(TESTS), "ALMANAC_REQUIRE_CLUSTER": str(int(is_required)), "ALMANAC_SHARED_DATA": "/none",
    }  # fmt: skip
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert all(f"by a {what}" in done.stdout for what in ("mark", "call", "fixture")), done.stdout
    assert "the real traces are not part of the project" in done.stdout
    last = done.stdout.splitlines()[-1]
    if is_required:
        assert done.returncode == 1
        assert "3 failed, 1 passed, 2 errors" in last, done.stdout
    else:
        assert done.returncode == 0
        assert "1 passed, 4 skipped, 1 xfailed" in last, done.stdout
