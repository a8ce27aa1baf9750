"""Reports in a real browser: nothing wider than a phone, dark where that is liked, and no request leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, look

from reports.job.conclusions import report_of
from reports.job.render import render_email, render_page

WIDTHS = (360, 700)
LAYOUTS = ("balanced", "64-gpus", "hostile", "no-telemetry")
"""Shown at each width in each mode; the others, which are laid out as one of these, once narrow and dark."""
OTHERS = ("never-started", "half", "failed", "out-of-memory", "cancelled", "requeued", "mig", "array-task", "timeout")
CASES = [
    *((case, width, is_dark) for case in LAYOUTS for width in WIDTHS for is_dark in (False, True)),
    *((case, 360, True) for case in OTHERS),
]


@pytest.fixture(scope="session")
def background() -> frozenset[str]:
    """Hosts that the browser itself asks for, whatever the page."""
    if not CHROMIUM:
        if os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
            pytest.fail("chromium is not installed, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
        pytest.skip("the pages are not looked at: chromium is not installed (make test installs it as root)")
    return look("<p>empty", 360).asked


@pytest.mark.cluster
def test_a_request_that_leaves_would_be_seen(background: frozenset[str]) -> None:
    seen = look('<body style="width: 900px"><img src="http://evil.example/x.png">', 360)
    assert seen.asked - background == {"evil.example"}
    assert seen.width > 360


@pytest.mark.cluster
@pytest.mark.parametrize(("case", "width", "is_dark"), CASES)
def test_a_page_fits_and_asks_for_nothing(
    reported: Any, background: frozenset[str], tmp_path: Path, case: str, width: int, is_dark: bool
) -> None:
    """ALMANAC_PICTURES names a folder for what the browser showed."""
    folder = Path(os.environ.get("ALMANAC_PICTURES") or tmp_path)
    picture = folder / f"{case}-{width}-{'dark' if is_dark else 'light'}.png"
    seen = look(render_page(report_of(reported.contexts[case])), width, is_dark=is_dark, picture=picture)
    assert seen.width == width
    assert not seen.asked - background
    assert seen.is_dark == is_dark
    assert seen.ground == ("rgb(18, 22, 28)" if is_dark else "rgb(238, 241, 245)")
    assert picture.stat().st_size > 5000


@pytest.mark.cluster
def test_the_mail_itself_fits_a_phone_without_its_pictures(reported: Any, background: frozenset[str]) -> None:
    seen = look(render_email(report_of(reported.contexts["balanced"])).html, 360)
    assert seen.width == 360
    assert not seen.asked - background
