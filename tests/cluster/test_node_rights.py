"""Rights to change nodes, which docs/admin.md tells sites to grant to the service of `almanac power`."""

from __future__ import annotations

import pytest
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]


def test_only_an_administrator_may_change_nodes(site: Site) -> None:
    node = site.run("ctl", "root", "sinfo", "-h", "-N", "-o", "%N").stdout.split()[0]
    order = ("scontrol", "update", f"nodename={node}", "comment=almanac")

    def grant(level: str) -> None:
        site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "bob", "set", f"adminlevel={level}", check=False)

    try:
        for level in ("None", "Operator"):
            grant(level)
            assert site.run("ctl", "bob", *order, check=False).rc != 0, level
        grant("Administrator")
        assert site.run("ctl", "bob", *order, check=False).rc == 0
    finally:
        grant("None")
