"""The documentation says what the code does: generated pages are fresh, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("name", ["configuration.md", "tables.md", "cli.md", "report-rules.md"])
def test_generated_pages_are_fresh(name: str) -> None:
    """In a process of its own: click keeps the help option of a command as the first call in a process named it."""
    page = subprocess.run([sys.executable, ROOT / "docs/generate.py", name], capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page.stdout, "run `make docs`"


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


def test_the_page_for_users_leads_to_no_operators_page() -> None:
    page = (ROOT / "docs/users.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([^)#]+)", page)) <= {"reports.md"}
    for word in ("systemctl", "slurm.conf", "almanac.toml", "publish", "/etc/", "almanac ingest"):
        assert word not in page


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"
