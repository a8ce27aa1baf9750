"""The session's cluster: started once, by the first test that asks for it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab import missing_commands
from testbed import Cluster, running_cluster


def _what_is_missing() -> str:
    """Why no cluster can be started here; "" where it can."""
    if os.geteuid() != 0:
        return "cluster tests need root"
    absent = missing_commands(["prometheus", "setpriv", "useradd"])
    return f"cluster tests need {', '.join(absent)} (make test installs them as root)" if absent else ""


@pytest.fixture
def lab_root() -> Iterator[Path]:
    """An empty folder that the lab's users can reach; pytest's own tmp_path is closed to them."""
    yield from _lab_root()


def _lab_root() -> Iterator[Path]:
    reason = _what_is_missing()
    if reason and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"{reason}, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
    if reason:
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="almanac-lab-", dir="/var/tmp"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Real Slurm with four nodes, the fake exporter and a real Prometheus (testbed.Cluster)."""
    for root in _lab_root():
        with running_cluster(root) as running:
            yield running
