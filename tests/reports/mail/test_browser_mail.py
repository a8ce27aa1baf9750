"""Digests in a real browser, at two widths and in dark mode; ALMANAC_PICTURES names a folder for what it showed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, look

from reports.mail.digest import render_burst, render_weekly

NOW_S = 1_795_003_200


@pytest.mark.cluster
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", (360, 700))
@pytest.mark.parametrize("kind", ["storm", "weekly"])
def test_a_digest_fits_and_asks_for_nothing(
    reported: Any, tmp_path: Path, kind: str, width: int, is_dark: bool
) -> None:
    if not CHROMIUM:
        if os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
            pytest.fail("chromium is not installed, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
        pytest.skip("the digests are not looked at: chromium is not installed (make test installs it as root)")
    store, config = reported.store, reported.config
    if kind == "storm":
        mail = render_burst(list(reported.contexts.values()), config).rendered
    else:
        found = render_weekly(store.of("test"), "alice", config, NOW_S + 7 * 86_400)
        assert found is not None
        mail = found.rendered
    folder = Path(os.environ.get("ALMANAC_PICTURES") or tmp_path)
    picture = folder / f"{kind}-{width}-{'dark' if is_dark else 'light'}.png"
    seen = look(mail.html, width, is_dark=is_dark, picture=picture)
    assert seen.width == width
    assert not seen.asked - look("<p>empty", 360).asked
    assert seen.ground == ("rgb(18, 22, 28)" if is_dark else "rgb(238, 241, 245)")
