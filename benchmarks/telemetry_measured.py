"""Wall time, CPU time and peak memory of one task in this process."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """wall_s, cpu_s: of the task. rss_mib: highest memory of the process, imports included."""

    wall_s: float
    cpu_s: float
    rss_mib: float
    result: Any

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def measure(task: Callable[[Path], Any], root: Path) -> Measured:
    """Run a task once. Imports and file caches are warm: it is run on the caller's word only."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = task(root)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Measured(wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result)
