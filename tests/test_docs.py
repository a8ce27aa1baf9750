"""The documentation says what the code does: generated pages are fresh, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def _generator() -> object:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "tables.md", "cli.md", "report-rules.md"])
def test_generated_pages_are_fresh(name: str) -> None:
    pages = _generator().PAGES  # type: ignore[attr-defined]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == pages[name](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_shows_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"almanac {name}" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_named_in_the_docs_exist(page: Path) -> None:
    for name in re.findall(r"`almanac ([a-z][a-z-]*)", page.read_text(encoding="utf-8")):
        assert name in COMMANDS, f"{page.name} names `almanac {name}`"
