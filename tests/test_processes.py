"""Runs of the tests: several processes share those of clusters, and skips are named or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLUSTER = """
import os, time, pytest

ALONE = os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"

@pytest.mark.parametrize("other", "ab")
@pytest.mark.parametrize("site", ["native", "24.11", "26.05"])
def test_site(site, other):
    time.sleep(0 if ALONE else 0.2)
    with open("ran", "a") as ran:
        ran.write(f"{site} {os.environ['PYTEST_XDIST_WORKER']}\\n")
"""


@pytest.mark.parametrize("processes", [1, 3, 7])
def test_no_site_has_more_clusters_than_it_may(tmp_path: Path, processes: int) -> None:
    folder = tmp_path / "tests/cluster"
    folder.mkdir(parents=True)
    for name in "abcd":
        (folder / f"test_{name}.py").write_text(CLUSTER)
        rest = CLUSTER.replace('["native", "24.11", "26.05"]', '["rest"]')
        (folder.parent / f"test_rest_{name}.py").write_text(rest)
    argv = f"{sys.executable} -m pytest -W error -p conftest -p no:cacheprovider -n {processes} tests".split()
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) == 4 * 2 * 4
    by_site = {site: {process for name, process in ran if name == site} for site, _ in ran}
    assert len(by_site["26.05"]) == 1
    assert len(by_site["native"]) == len(by_site["24.11"]) == (2 if processes == 7 else 1)


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


@pytest.mark.parametrize("is_required", [False, True])
def test_a_file_that_is_skipped_whole_is_named_and_refused(tmp_path: Path, is_required: bool) -> None:
    (tmp_path / "test_lacking.py").write_text('import pytest\npytest.skip("by a file", allow_module_level=True)\n')
    argv = [sys.executable, "-m", "pytest", "-p", "conftest", "-ra", "-p", "no:cacheprovider", "."]
    env = os.environ | {"PYTHONPATH": str(TESTS), "ALMANAC_REQUIRE_CLUSTER": str(int(is_required))}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "by a file" in done.stdout
    assert ("1 error" if is_required else "1 skipped") in done.stdout.splitlines()[-1], done.stdout
