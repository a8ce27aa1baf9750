"""The stand-in for slurmctld lies beside the tests, the emulators of BMCs with those of the cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "cluster")]
