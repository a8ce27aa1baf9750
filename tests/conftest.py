"""Settings of every test, what it may lack, and which modules `make test-unit` leaves out for their length."""

import os
import re
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# In the background of a script Ctrl-C is ignored, under nohup a hang-up, and so by children of which it is tested.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# How long an example takes says something of the machine, not of the code.
settings.register_profile("almanac", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("almanac")

SLOW = {
    "test_backtest.py",
    "test_backtest_power.py",
    "test_characterize.py",
    "test_commands.py",
    "test_dask_engine.py",
    "test_demo.py",
    "test_doctor_filter.py",
    "test_durations.py",
    "test_engines.py",
    "test_file_modes.py",
    "test_forecast.py",
    "test_generated_marginals.py",
    "test_h100.py",
    "test_h100_page.py",
    "test_ingest_clock.py",
    "test_jobs.py",
    "test_online.py",
    "test_own_reading.py",
    "test_own_reports.py",
    "test_own_safety.py",
    "test_package.py",
    "test_power.py",
    "test_power_programs.py",
    "test_power_rules.py",
    "test_properties.py",
    "test_publish.py",
    "test_redfish.py",
    "test_report.py",
    "test_report_due.py",
    "test_report_due_trouble.py",
    "test_reprioritize.py",
    "test_sbatch_almanac.py",
    "test_services.py",
    "test_shown.py",
    "test_site_page.py",
    "test_steps.py",
    "test_store.py",
    "test_summarize.py",
    "test_summary.py",
    "test_summary_killed.py",
    "test_summary_splits.py",
    "test_wheel.py",
    "test_workers.py",
}


NOT_OURS = "the real traces are not part of the project"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ALMANAC_REQUIRE_CLUSTER=1 whoever skips fails, but for want of a trace: nobody else has those."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1" and NOT_OURS not in str(report.longrepr):
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
            pytest.skip(f"{name} is not there: {NOT_OURS}")
        return path

    return find


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew; look at what changed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker("slow")


ONE_FIXTURE = {"test_generated_marginals.py", "test_package.py"}
"""Modules whose fixture takes half a minute or more, so that no second process makes it."""


class ProcessPerCluster(LoadScopeScheduling):
    """Tests of one cluster, or of a module of ONE_FIXTURE, all go to one process; the others to whichever is free."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if not module.startswith("tests/cluster/"):
            return module if Path(module).name in ONE_FIXTURE else nodeid
        release = re.search(r"\[(\d\d\.\d\d)\b", nodeid)
        return release[1] if release else "native"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ProcessPerCluster:
    return ProcessPerCluster(config, log)
