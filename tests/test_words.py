"""The documentation is written in plain words: phrasings that readers stumble over are in no page listed here."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPELLED = (".md", ".py", ".lua", ".j2", ".toml", ".sql", ".sh", ".yml", "Makefile")

PAGES = ["README.md", "CHANGELOG.md", "docker/README.md"]
PAGES += sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))

FORBIDDEN = {
    r"of which": "start a sentence of its own",
    r"anew": "again",
    r"thereof": "of it",
    r"(is|are|was|were) told of": "knows, learns of",
    r"(has|have) to be said": "say it",
    r"(is|are) to be": "must be, or an imperative",
    r"none but": "only",
    r"be it": "whether",
    r"no matter of": "not a ... problem",
    r"as if it had been": "say what happens",
    r"against a job in the middle": "behind a typical job",
    r"put to bed": "power down",
    r"who may not": "if you cannot, without access to",
    r"meets no filter": "is filtered out",
    r"set aside": "excluded",
    r"(honour|colour|licence|summaris|prioritis)\w*": "US spelling",  # codespell:ignore
}


DATA = "not summarised|the job is set aside"
"""Values that tables and outputs hold; they keep their spelling."""


def prose(page: str) -> str:
    """The page without code, fenced or indented, and without link targets.

    Code shows what a program prints. Line breaks become blanks, because a phrasing can be wrapped.
    """
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^ {4}.*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`|\]\([^)]*\)", "", page)
    return re.sub(DATA, "", re.sub(r"\s+", " ", page))


def found_in(text: str) -> list[str]:
    hits = ((re.search(rf"\b{phrase}\b", text, re.IGNORECASE), better) for phrase, better in FORBIDDEN.items())
    return [f"{hit[0]!r}: write {better!r}" for hit, better in hits if hit]


def test_a_phrasing_is_found_across_a_line_break_and_not_in_program_output() -> None:
    assert found_in(prose("A list, of\nwhich two are new.")) == ["'of which': write 'start a sentence of its own'"]
    assert found_in(prose("Write it ANEW.")) == ["'ANEW': write 'again'"]
    assert found_in(prose("```\nmade anew\n```\n\n    anew\n\n`anew` [page](anew.md) renewed, maybe it")) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_plain_page_stays_plain(name: str) -> None:
    assert found_in(prose((ROOT / name).read_text(encoding="utf-8"))) == []


def test_words_are_spelled_as_in_the_us() -> None:
    """codespell's lists of common mistakes and of British spellings; pyproject.toml says which words stay."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    files = [name for name in listed.decode().split("\0") if name.endswith(SPELLED) and (ROOT / name).is_file()]
    assert {"README.md", "docs/users.md", "cli/main.py", "almanac/config.py"} <= set(files)
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


@pytest.mark.parametrize("word", ["utilisation", "recieve", "colour"])  # codespell:ignore
def test_a_misspelled_word_is_found(tmp_path: Path, word: str) -> None:
    (tmp_path / "page.md").write_text(f"The {word}.\n")
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--toml", ROOT / "pyproject.toml", tmp_path / "page.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert word in done.stdout


def test_help_texts_are_plain() -> None:
    reference = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert found_in(re.sub(r"\s+", " ", reference)) == []


def texts_of(source: str) -> str:
    """Strings, docstrings, and comments of a Python module."""
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [line for token in tokens if token.type in kinds for line in token.string.splitlines()]
    return "\n".join(line.strip("\"'# ") for line in lines)


def test_texts_of_a_module_are_its_strings_and_comments() -> None:
    source = 'def anew():  # made anew\n    """Of\n    which two."""\n'
    assert found_in(prose(texts_of(source))) == [
        "'Of which': write 'start a sentence of its own'", "'anew': write 'again'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "package", ["almanac", "slurm", "telemetry", "advisor", "demo", "simulator", "slurm_hooks", "reports", "cli"]
)
def test_texts_in_the_code_are_plain(package: str) -> None:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        text = prose(texts_of(path.read_text(encoding="utf-8")))
        if hits := found_in(text):
            found[str(path.relative_to(ROOT))] = hits
    assert found == {}
