"""Publishing from the site of reports/conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from publisher import IS_ROOT, Publisher

from almanac.published.files import read_own


@pytest.fixture
def publisher(reported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    tmp_path.chmod(0o755)
    if not IS_ROOT:  # without root, one user owns all files
        monkeypatch.setattr(
            "almanac.published.files.read_own", lambda path, _, most: read_own(path, os.geteuid(), most)
        )
    return Publisher(reported, tmp_path / "advice")


@pytest.fixture(scope="session")
def everything_published(reported: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published") / "advice"
    Publisher(reported, root)()
    return root


@pytest.fixture
def published(publisher: Publisher, everything_published: Path) -> Publisher:
    """A publisher that has published everything."""
    subprocess.run(["cp", "-a", everything_published, publisher.root], check=True)
    return publisher
