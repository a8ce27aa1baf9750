"""Everything that almanac says on a fixed site is as it was: a wanted change shows in the diff of a file."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import pytest
from cases import CASES
from golden_site import Bench

from almanac import __version__

FILES = Path(__file__).parent / "files"
MASKS = (
    (re.escape(__version__), "VERSION"),
    (r"-[0-9a-f]{12,16}\b", "-HASH"),
    (r'("decision_s": )[0-9.e-]+', r"\g<1>0"),
)
"""The release, digests (they change with the last bit of a number), and the time that a decision took."""
MOST_LINES, MOST_COLUMNS = 60, 300
UPDATE = "if that is right: pytest tests/golden --update-golden"


def masked(name: str, text: str, site: Path) -> str:
    """The text without what depends on the machine; numbers of JSON and CSV to 6 digits."""
    if name.endswith(".json") and text.startswith(("{", "[")):
        content, end = json.JSONDecoder(parse_float=lambda digits: float(f"{float(digits):.6g}")).raw_decode(text)
        text = json.dumps(content, indent=2) + text[end:]
    elif name.endswith(".csv"):
        text = re.sub(r"-?\d+\.\d+(?:e[+-]?\d+)?", lambda found: f"{float(found[0]):.6g}", text)
    for pattern, instead in ((re.escape(str(site)), "SITE"), *MASKS):
        text = re.sub(pattern, instead, text)
    return text


def diff_of(path: Path, text: str) -> str:
    """Return the changes of a file, no longer than a person reads."""
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    name = str(path.relative_to(FILES))
    lines = list(difflib.unified_diff(known.splitlines(), text.splitlines(), name, "now", lineterm="", n=1))
    cut = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([line[:MOST_COLUMNS] for line in lines[:MOST_LINES]] + cut)


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_as_it_was(name: str, bench: Bench, request: pytest.FixtureRequest) -> None:
    path, text = FILES / name, masked(name, CASES[name](bench), bench.site)
    assert "Traceback" not in text
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    if not request.config.getoption("--update-golden"):
        pytest.fail(f"{diff_of(path, text)}\n{UPDATE}", pytrace=False)
    request.node.user_properties.append((f"golden {name}", diff_of(path, text)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_every_file_is_of_a_case() -> None:
    strays = {str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file()} - set(CASES)
    assert not strays, "no case of tests/golden/cases.py names these files: remove them"
