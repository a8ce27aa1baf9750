"""The documentation says what the code does: pages are fresh, links lead somewhere, commands exist; its site builds."""

from __future__ import annotations

import compileall
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


GENERATED = ["configuration.md", "tables.md", "cli.md", "report-rules.md", "rooms.md", "images/rooms.svg"]


@pytest.mark.parametrize("name", GENERATED)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_and_tests_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    packages = "almanac|slurm|telemetry|advisor|demo|simulator|slurm_hooks|reports|cli|tests|docs|scripts|benchmarks"
    for name in re.findall(rf"`((?:{packages})/[\w/-]+\.(?:py|lua|sh))`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert any((ROOT / "tests").rglob(name)), f"{page.name} names {name}"


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


LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
LINK_LOADS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as `make docs` does. --quiet would hide the warnings from --strict."""
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, check=False)


class Page(HTMLParser):
    """Links and loaded files of a page, its anchors, and its text outside code."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self._in_code = 0
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])
        if tag == "link" and set(values.get("rel", "").split()) & LINK_LOADS:
            self.loads.append(values["href"])
        self._in_code += tag in ("pre", "code", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_code -= tag in ("pre", "code", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._in_code:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    compileall.compile_file(ROOT / "docs" / "generate.py", quiet=1)  # as each run of it leaves behind
    done = build(ROOT, site)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_the_navigation_has_every_page(pages: dict[Path, Page], site: Path) -> None:
    start = site / "index.html"
    named = {start.parent / link for link in pages[start].links}
    sources = {site / f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert sources | {site / "docker/index.html", site / "CHANGELOG.html"} == set(pages)
    # Tabs link the first page of a group; the rest is in the menu of the same page.
    assert sources <= {Path(os.path.normpath(str(page).partition("#")[0])) for page in named}


def test_no_page_loads_anything_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    outside = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert outside == set()
    sheets = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    assert sheets
    for sheet in sheets:
        assert not re.findall(r"(?:@import\s*|url\()[\"']?(?:https?:)?//", sheet)


def test_code_blocks_in_lists_are_code_blocks(pages: dict[Path, Page]) -> None:
    """Python-Markdown needs four blanks before a fence in a list. The pages have three, as GitHub needs them."""
    assert {file.name for file, page in pages.items() if "```" in page.text} == set()
    # An item that follows such a block is an item, and a heading stays a heading.
    for file in pages:
        page = re.sub(r"<pre.*?</pre>", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"(?m)^(?:<p>)?(?:\d+\.|#+) .*", page) == [], file.name


def test_the_search_finds_what_people_ask_first(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    titles = [entry["title"].lower() for entry in found]
    for word in ("privacy", "disk", "uninstall", "cpu-only", "slurm versions", "upgrade", "slurmctld"):
        assert any(word in title for title in titles), word


def test_programs_and_templates_stay_out(site: Path) -> None:
    assert {file.suffix for file in site.rglob("*") if file.is_file()} & {".py", ".pyc", ".j2", ".md"} == set()


PICTURES = sorted((ROOT / "docs/images").iterdir())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_generated_used_and_small(picture: Path) -> None:
    programs = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("screenshots.py", "generate.py")]
    assert any(f'{picture.name}"' in text for text in programs), "`make screenshots` or `make docs`"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"images/{picture.name}" in page.read_text(encoding="utf-8") for page in pages)
    assert picture.stat().st_size <= 150_000


def test_a_drawn_terminal_loads_nothing_from_another_host() -> None:
    picture = (ROOT / "docs/images/prompt.svg").read_text(encoding="utf-8")
    assert "[y]es" in picture.replace("&#160;", " ")
    assert not re.search(r"@font-face|@import|url\([\"']?https?:|href=", picture)
