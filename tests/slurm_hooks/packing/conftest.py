"""The fixture of almanac-pack's tests: see pack_job.py."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pack_job import TIMEOUT_S, PackJob


@pytest.fixture
def job() -> Iterator[PackJob]:
    root = Path(tempfile.mkdtemp(prefix="pk", dir="/tmp"))  # short: pipes are Unix sockets
    made = PackJob(root)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(root)
