"""Settings of every test, what it may lack, and which tests `make test-unit` leaves out for their length."""

import fcntl
import functools
import gc
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

sys.path.append(str(Path(__file__).parent))

import durations
import one_duckdb

from advisor import version_folders

# In the background of a script Ctrl-C is ignored, under nohup a hang-up, and so by children of which it is tested.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# How long an example takes says something of the machine, not of the code.
IGNORED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("almanac", derandomize=False, deadline=None, suppress_health_check=IGNORED)
settings.register_profile("few", settings.get_profile("almanac"), max_examples=20)  # for `make test`
settings.register_profile("fewest", settings.get_profile("almanac"), max_examples=5)  # for `make test-unit`
settings.load_profile("almanac")


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("reports.mail.record_file.SYNCHRONOUS", "OFF")
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_duckdb() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duckdb, "connect", one_duckdb.connect)
        yield


@pytest.fixture(scope="session", autouse=True)
def _each_model_checked_once() -> Iterator[None]:
    """Commands of one process each load the models that a site was trained with, and check every tree."""
    known = functools.lru_cache(64)(version_folders._require_whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            version_folders, "_require_whole", lambda text, names: known(text, names if names is None else (*names,))
        )
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ALMANAC_REQUIRE_CLUSTER=1 a test fails that skips, or that is expected to fail and does."""
    report = yield
    if report.skipped and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}: ALMANAC_REQUIRE_CLUSTER=1 forbids to skip"
        vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that is skipped whole is refused likewise."""
    report = yield
    if report.skipped and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}: ALMANAC_REQUIRE_CLUSTER=1 forbids to skip"
    return report


TRACES = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def trace() -> Callable[[str], Path]:
    """The file of a real trace, which is no part of the project: a test that asks for an absent one is skipped."""

    def find(name: str) -> Path:
        path = Path(os.environ.get("ALMANAC_SHARED_DATA") or TRACES) / name
        if not path.exists():
            pytest.skip(f"{name} is not there: the real traces are not part of the project")
        return path

    return find


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Copy a folder that only the first process of a run fills: (name, fill) -> this process's copy."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def copy(name: str, fill: Callable[[Path], None]) -> Path:
        folder, is_done = shared / f"{name}-built", shared / f"{name}-done"
        with (shared / f"{name}-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                is_done.touch()
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp(name) / name, copy_function=_link))

    return copy


def _link(source: str, target: str) -> None:
    """Share the data, which the store replaces and never changes in place. Copy anything else."""
    (os.link if source.endswith(".parquet") else shutil.copy2)(source, target)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew; look at what changed")
    parser.addoption("--renew-durations", action="store_true", help="write tests/slow.txt anew")
    parser.addoption(
        "--check-durations", action="store_true", help="refuse a tests/slow.txt that does not fit the tests"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))
    if config.getoption("--renew-durations"):
        config.pluginmanager.register(durations.Measure())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which would look at all that was collected again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return f"property tests: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    durations.mark_slow(items)
    if config.getoption("--check-durations") and (wrong := durations.faults(items)):
        raise pytest.UsageError(*wrong, "try: make durations")
    # Long modules come first, so that none is left to one process at the end; clusters have their own processes.
    first = {item.path for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("cluster")}
    items.sort(key=lambda item: item.path not in first)


MOST_CLUSTERS = {"24.11": 2, "native": 2}
"""Processes that may each run a cluster of a site; one where nothing is said."""


class ProcessPerCluster(LoadScopeScheduling):
    """Send each module to one process, and those of one site to few: a process starts its own cluster of a site.

    The rest goes to whoever has no site, and at the end to all.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if not module.startswith("tests/cluster/"):
            return module
        release = re.search(r"[-\[](\d\d\.\d\d)[-\]]", nodeid)
        return f"{module}@{release[1] if release else 'native'}"

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next_scope(node)
        if scope is None:
            node.shutdown()  # once it has done what it has: it holds its last test back until then
            return
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _next_scope(self, node: WorkerController) -> str | None:
        """Of the node's site, of a site that has too few nodes, or of no site."""
        held = {other: self._site_of(other) for other in self.nodes}
        sites = [site for site in dict.fromkeys(map(_site, self.workqueue)) if site]
        free = sorted(
            (site for site in sites if list(held.values()).count(site) < MOST_CLUSTERS.get(site, 1)),
            key=list(held.values()).count,
        )
        wanted = held[node] if held[node] in sites else next(iter(free), "")
        return next((scope for scope in self.workqueue if _site(scope) == wanted), None) or next(
            (scope for scope in self.workqueue if not _site(scope)), None
        )

    def _site_of(self, node: WorkerController) -> str:
        """The site of the last tests that a node was given; "" after any others."""
        return _site(next(reversed(self.assigned_work[node]), ""))


def _site(scope: str) -> str:
    return scope.partition("@")[2]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ProcessPerCluster:
    config.option.loadscopereorder = False
    return ProcessPerCluster(config, log)
