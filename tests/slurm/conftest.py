"""The contract of the backends lies with the cluster tests, which run it on real servers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
