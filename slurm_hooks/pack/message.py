"""Lines of almanac-pack for the user."""

from __future__ import annotations

import os
import select

from almanac.units import printable

WAIT_S = 1.0


def say(text: str) -> None:
    """One line on standard error, without control characters. A full disk, or a pipe that nobody reads, loses it."""
    line = f"almanac-pack: {printable(text, 500)}\n".encode("utf-8", "replace")
    try:
        if select.select([], [2], [], WAIT_S)[1]:
            os.write(2, line)
    except OSError:
        return
