"""The site of the documentation builds without a warning, has every page, and loads nothing from another host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
LINK_LOADS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as `make docs` does. --quiet would hide the warnings from --strict."""
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, check=False)


class Page(HTMLParser):
    """What a page links to, what it loads, its anchors, and its text outside code."""

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


def test_every_link_leads_to_a_page_and_a_heading(pages: dict[Path, Page], site: Path) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            path, _, anchor = urljoin(file.relative_to(site).as_posix(), link).partition("#")
            target = site / unquote(path)
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].ids if target in pages else set()
            if not target.is_file() or (anchor and unquote(anchor) not in known):
                broken.append((file.name, link))
    assert broken == []


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


def test_programs_and_templates_stay_out(site: Path) -> None:
    assert {file.suffix for file in site.rglob("*") if file.is_file()} & {".py", ".j2", ".md"} == set()


def test_the_users_page_leads_only_to_pages_of_users(pages: dict[Path, Page], site: Path) -> None:
    page = (site / "users.html").read_text(encoding="utf-8")
    article = page[page.index("<article") : page.index("</article>")]
    assert {link.partition("#")[0] for link in re.findall(r'href="([^"]*)"', article)} <= {"", "reports.html"}
    assert "reports.html" in article


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index.md": "[lost](lost.md)\n"}, "lost.md"),
        ({"index.md": "[lost](users.md#lost)\n"}, "lost"),
        ({"extra.md": "# A page that the navigation lacks\n"}, "extra.md"),
        ({"index.md": "[lost](../docker/LOST.md)\n"}, "LOST.md"),
    ],
)
def test_a_broken_link_or_a_page_without_a_place_fails_the_build(
    tmp_path: Path, change: dict[str, str], named: str
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "slurm_hooks", tmp_path / "slurm_hooks")
    (tmp_path / "docker").mkdir()
    shutil.copy(ROOT / "docker/README.md", tmp_path / "docker")
    for name, text in change.items():
        with (tmp_path / "docs" / name).open("a", encoding="utf-8") as page:
            page.write(text)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert named in done.stdout + done.stderr


PICTURES = sorted((ROOT / "docs/images").iterdir())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_generated_used_and_small(picture: Path) -> None:
    assert f'"{picture.name}"' in (ROOT / "docs/screenshots.py").read_text(encoding="utf-8"), "`make screenshots`"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"images/{picture.name}" in page.read_text(encoding="utf-8") for page in pages)
    assert picture.stat().st_size <= 150_000


def test_a_drawn_terminal_loads_nothing_from_another_host() -> None:
    picture = (ROOT / "docs/images/prompt.svg").read_text(encoding="utf-8")
    assert "[y]es" in picture.replace("&#160;", " ")
    assert not re.search(r"@font-face|@import|url\([\"']?https?:|href=", picture)
