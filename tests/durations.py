"""The slow tests: tests/slow.txt lists them, `make durations` measures it anew, `make lint` compares it.

A line is CPU seconds (of the process and its children, so that a busy machine counts for little) and a test's id,
without parameters if all its cases are slow.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
LIMIT_S = 0.5
MOST = 0.08
"""Share of the cases that may be slow: if more take longer than LIMIT_S, the slowest of them are."""
SPARED_S = 3
PACKAGES = ("almanac", "slurm", "telemetry", "advisor", "demo", "simulator", "slurm_hooks", "reports", "cli")


def listed() -> set[str]:
    return set(map(name_in, LIST.read_text(encoding="utf-8").splitlines()))


def name_in(line: str) -> str:
    return line.split(" ", 1)[1]


def module_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def mark_slow(items: list[pytest.Item]) -> None:
    names = listed()
    for item in items:
        if item.nodeid in names or function_of(item.nodeid) in names:
            item.add_marker("slow")


def faults(items: list[pytest.Item]) -> list[str]:
    """Say what is wrong with the list. items: all tests."""
    found = {each for item in items for each in (item.nodeid, function_of(item.nodeid))}
    cases = [item for item in items if not item.get_closest_marker("cluster")]
    quick = [item for item in cases if not item.get_closest_marker("slow")]
    untested = set().union(*map(modules_of, cases)) - set().union(*map(modules_of, quick))
    wrong = [f"{name} is no test" for name in sorted(listed() - found)]
    wrong += [f"every test of {name} is slow" for name in sorted(untested)]
    if len(cases) - len(quick) > MOST * len(cases):
        wrong.append(f"{len(cases) - len(quick)} of {len(cases)} cases are slow; at most {MOST:.0%} may be")
    return wrong


def modules_of(item: pytest.Item) -> set[str]:
    """Modules of ours from which the test's module imports something."""
    names = (getattr(each, "__module__", None) for each in vars(item.module).values())  # type: ignore[attr-defined]
    return {name for name in names if isinstance(name, str) and name.partition(".")[0] in PACKAGES}


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Measure:
    """Writes LIST at the end of a run. A fixture that tests share counts for each of them in equal parts."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.alone_s: dict[str, float] = {}
        self.shared_s: dict[tuple[str, str], float] = defaultdict(float)
        self.whole_s: dict[tuple[str, str], float] = defaultdict(float)
        self.began_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        before_s = cpu_s()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                users = sum(_uses(item, fixturedef.argname, fixturedef.baseid) for item in request.session.items)
                name = fixturedef.argname, fixturedef.baseid
                self.shared_s[name] += (cpu_s() - before_s) / max(1, users)
                self.whole_s[name] += cpu_s() - before_s
                self.began_s += cpu_s() - before_s

    def pytest_runtest_logstart(self) -> None:
        self.began_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        own_s = cpu_s() - self.began_s
        for name, fixtures in (("cpu_s", self.shared_s), ("alone_s", self.whole_s)):
            shared_s = sum(each_s for fixture, each_s in fixtures.items() if _uses(item, *fixture))
            report.user_properties.append((name, own_s + shared_s))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        self.spent_s[report.nodeid], self.alone_s[report.nodeid] = float(said["cpu_s"]), float(said["alone_s"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep the lines of modules that did not run."""
        if hasattr(session.config, "workerinput"):
            return
        ran = {module_of(name) for name in self.spent_s}
        lines = LIST.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if module_of(name_in(line)) not in ran]
        found = [f"{spent_s:.1f} {name}" for name, spent_s in self.slow().items()]
        LIST.write_text("\n".join(sorted([*kept, *found], key=name_in)) + "\n")

    def slow(self) -> dict[str, float]:
        """Seconds of each slow case; the longest of a function whose cases are all slow.

        The quickest case of a test module is not slow, unless it takes SPARED_S with the fixtures that it shares.
        """
        limit_s = max(LIMIT_S, sorted(self.spent_s.values())[int((1 - MOST) * len(self.spent_s))])
        functions: dict[str, dict[str, float]] = defaultdict(dict)
        quickest: dict[str, str] = {}
        for name, spent_s in sorted(self.spent_s.items(), key=lambda item: item[1]):
            functions[function_of(name)][name] = spent_s
            quickest.setdefault(module_of(name), name)
        found: dict[str, float] = {}
        for function, spent in functions.items():
            slow = {
                name: spent_s
                for name, spent_s in spent.items()
                if spent_s > limit_s and (name not in quickest.values() or self.alone_s[name] > SPARED_S)
            }
            found |= {function: max(slow.values())} if len(slow) == len(spent) else slow
        return found


def _uses(item: pytest.Item, fixture: str, base: str) -> bool:
    return fixture in getattr(item, "fixturenames", ()) and item.nodeid.startswith(base)
