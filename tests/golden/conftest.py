"""The pinned site, built once, and the summary of what `--update-golden` changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reports"))
sys.path.insert(0, str(Path(__file__).parent))

from golden_site import Bench, fill, hold_still
from reported_site import reported as reported

MOST_LINES = 400


@pytest.fixture(scope="session")
def golden_site(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The site; commands must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        hold_still(patch)
        return built_once("golden", fill)


@pytest.fixture(scope="session")
def kept() -> dict[str, Path]:
    """Copies of the site that several cases look at."""
    return {}


@pytest.fixture
def bench(
    golden_site: Path, kept: dict[str, Path], tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> Iterator[Bench]:  # fmt: skip
    """The site at its own time, in the working folder."""
    hold_still(monkeypatch)
    monkeypatch.chdir(golden_site)
    yield Bench(golden_site, tmp_path_factory.mktemp("golden"), kept, lambda: request.getfixturevalue("reported"))
    monkeypatch.undo()
    time.tzset()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which files an update changed, and how."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    changes = {name: diff for report in reports for name, diff in report.user_properties if name.startswith("golden ")}
    if not changes:
        return
    terminalreporter.section("golden files changed")
    lines = [line for name in sorted(changes) for line in changes[name].splitlines()]
    terminalreporter.write_line("\n".join(lines[:MOST_LINES]))
    if len(lines) > MOST_LINES:
        terminalreporter.write_line(f"... and {len(lines) - MOST_LINES} more lines: git diff")
    terminalreporter.write_line("\n".join(["", *(name.removeprefix("golden ") for name in sorted(changes))]))
