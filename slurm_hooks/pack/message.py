"""Lines of almanac-pack for the user."""

from __future__ import annotations

import os

from almanac.units import printable


def say(text: str) -> None:
    """One line on standard error, without control characters. A full disk is passed over."""
    line = f"almanac-pack: {printable(text, 500)}\n".encode("utf-8", "replace")
    try:
        os.write(2, line)
    except OSError:
        return
