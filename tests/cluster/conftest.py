"""The session's cluster: started once, by the first test that asks for it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from docker_site import SUITES, DockerSite, why_not
from layout import missing_commands
from native_site import NativeSite
from processes import sweep, wait_until
from sites import Site
from testbed import Cluster, running_cluster

SITES = ("native", *SUITES)
"""Names that ALMANAC_SITES may list, comma-separated."""
MAIN_SITE = "24.11"
ALL_SITES = "native,24.11,26.05"
"""Under ALMANAC_REQUIRE_CLUSTER=1; the native one is Debian 12's, 22.05."""
LABS = Path("/var/tmp")
PREFIX = "almanac-lab-"


def _what_is_missing() -> str:
    """Return the reason why no cluster can be started here; "" if one can."""
    if os.geteuid() != 0:
        return "cluster tests need root"
    absent = missing_commands(["prometheus"])
    return f"cluster tests need {', '.join(absent)} (make test installs them as root)" if absent else ""


def _is_required() -> bool:
    return os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1"


def _need(missing: str) -> None:
    """Skip the test, or fail it if no test may be skipped; "": nothing is missing."""
    if missing and _is_required():
        pytest.fail(f"{missing}, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
    if missing:
        pytest.skip(missing)


@pytest.fixture
def lab_root() -> Iterator[Path]:
    """An empty folder that the lab's users can reach; pytest's own tmp_path is closed to them."""
    yield from _lab_root()


def _lab_root() -> Iterator[Path]:
    _need(_what_is_missing())
    _remove_abandoned()
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=LABS))
    (root / "owner").write_text(str(os.getpid()))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _remove_abandoned() -> None:
    """Ends and removes labs whose pytest was killed outright and so could not do it."""
    for root in LABS.glob(f"{PREFIX}*"):
        try:
            owner = int((root / "owner").read_text())
        except (OSError, ValueError):
            continue
        if not Path(f"/proc/{owner}").exists():
            sweep(root)
            shutil.rmtree(root, ignore_errors=True)


def _end_session(number: int, _frame: object) -> None:
    """A time limit's SIGTERM ends the session in order, so that no server outlives it."""
    pytest.exit(f"signal {number}", returncode=128 + number)


@pytest.fixture(scope="session")
def _running_cluster() -> Iterator[Cluster]:
    signal.signal(signal.SIGTERM, _end_session)
    for root in _lab_root():
        with running_cluster(root) as running:
            yield running


@pytest.fixture(scope="module")
def cluster(_running_cluster: Cluster) -> Cluster:
    """Real Slurm with four nodes, the fake exporter and a real Prometheus (testbed.Cluster).

    The process shares it with the tests on the native site: what modules before this one left in the queue is ended.
    """
    lab = _running_cluster.lab
    if jobs := lab.run("squeue", "-h", "-o", "%A").stdout.split():
        lab.run("scancel", *jobs, check=False)  # refused for parts of heterogeneous jobs, which end with their first
    wait_until("an empty queue", lambda: not lab.run("squeue", "-h").stdout, seen=lambda: lab.run("squeue").stdout)
    return _running_cluster


def _wanted_sites() -> list[str]:
    wanted = os.environ.get("ALMANAC_SITES") or (ALL_SITES if _is_required() else "native")
    if unknown := set(wanted.split(",")) - set(SITES):
        raise pytest.UsageError(f"ALMANAC_SITES names {sorted(unknown)}, expected some of {SITES}")
    return wanted.split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs on one site, 24.11 where that is there, and where the marker every_release says so on all.

    The marker sites(...) names those that it can run on. ALMANAC_EVERY_RELEASE=1 marks every test.
    """
    if "_running_site" not in metafunc.fixturenames:
        return
    marks = {mark.name: mark for mark in metafunc.definition.iter_markers()}
    sites = [name for name in _wanted_sites() if "sites" not in marks or name in marks["sites"].args]
    if "every_release" not in marks and os.environ.get("ALMANAC_EVERY_RELEASE") != "1":
        sites = [MAIN_SITE] if MAIN_SITE in sites else sites[:1]
    metafunc.parametrize("_running_site", sites, indirect=True, scope="session")


@pytest.fixture(scope="session")
def _running_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "native":
        yield NativeSite(request.getfixturevalue("_running_cluster").lab)
        return
    _need(why_not())
    with DockerSite(request.param) as running:
        yield running


@pytest.fixture
def site(_running_site: Site) -> Site:
    """A running Slurm without jobs, advice or hooks of an earlier test: see sites.py."""
    _running_site.reset()
    return _running_site
