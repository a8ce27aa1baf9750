"""Views of the power programs' work, for their tests."""

from __future__ import annotations

import re

from processes import wait_until
from sites import Site


def states(site: Site, node: str) -> set[str]:
    shown = site.run("ctl", "root", "scontrol", "-o", "show", "node", node).stdout
    return set(re.search(r" State=(\S+)", shown)[1].split("+"))  # type: ignore[index]


def wait_for_states(site: Site, node: str, wanted: set[str]) -> None:
    wait_until(f"{node} to be {'+'.join(sorted(wanted))}", lambda: states(site, node) == wanted)


def log_of_power(site: Site) -> str:
    """Return the programs' output so far; "" before their first call."""
    return site.run("ctl", "root", "cat", site.power_log, check=False).stdout
