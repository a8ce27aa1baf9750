"""The Lua interpreters that the Lua modules are tried with: 5.1 is Slurm's on Debian, later ones are other sites'."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lua_runner import INTERPRETERS, Lua


@pytest.fixture(scope="session", params=INTERPRETERS)
def lua(request: pytest.FixtureRequest) -> Lua:
    if shutil.which(request.param) is None:
        if request.param == "lua5.1" and os.environ.get("ALMANAC_REQUIRE_CLUSTER") == "1":
            pytest.fail("lua5.1 is not installed, and ALMANAC_REQUIRE_CLUSTER=1 forbids to skip")
        pytest.skip(f"{request.param} is not installed (make test installs lua5.1 as root)")
    return Lua(request.param)
