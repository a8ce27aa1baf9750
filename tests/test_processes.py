"""A run of several processes shares the tests of clusters: each process starts its own cluster of a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLUSTER = """
import os, time, pytest

@pytest.mark.parametrize("other", "ab")
@pytest.mark.parametrize("site", ["native", "24.11", "26.05"])
def test_site(site, other):
    time.sleep(0.2)
    with open("ran", "a") as ran:
        ran.write(f"{site} {os.environ['PYTEST_XDIST_WORKER']}\\n")
"""


@pytest.mark.parametrize("processes", [1, 3, 6])
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
    assert len(by_site["native"]) == len(by_site["26.05"]) == 1
    assert len(by_site["24.11"]) == (2 if processes == 6 else 1)
