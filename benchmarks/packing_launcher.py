"""How long almanac-pack takes to start its first task, without MPS, as the package installs it."""

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from figures import Figure, at_most, main

ROOT = Path(__file__).parents[1]
RUNS = 20
LIMIT_S = 0.3
MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurm_hooks.pack.launcher import main; main()"
NOTE = "import sys, time; sys.stdout.write(repr(time.time()))"


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        starts_s, whole_s, cpu_s = [], [], []
        for number in range(RUNS + 1):
            start_s, wall_s, used_s = _once(Path(folder))
            if number:  # the first fills the disk cache
                starts_s.append(start_s)
                whole_s.append(wall_s)
                cpu_s.append(used_s)
    median_s = statistics.median(starts_s)
    return [
        at_most(f"start of the first task, s, median of {RUNS}", median_s, LIMIT_S),
        Figure("start of the first task, s, longest", max(starts_s)),
        Figure("two empty tasks from start to end, s, median", statistics.median(whole_s)),
        Figure("the same, CPU time of all processes, s, median", statistics.median(cpu_s)),
    ]


def _once(folder: Path) -> tuple[float, float, float]:
    """Seconds until the first task runs its first line, until all has ended, and of CPU."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "1"}
    # The package has compiled files, too.
    python = ["/usr/bin/python3", "-IS", "-X", f"pycache_prefix={folder}/compiled"]
    command = [*python, "-c", MAIN, str(ROOT), "--items=0-1", "--", *python, "-c", NOTE]
    before, began_s = os.times(), time.time()
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    ended_s, after = time.time(), os.times()
    first_s = min(float(path.read_text()) for path in folder.glob("slurm-1_*.out"))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return first_s - began_s, ended_s - began_s, cpu


if __name__ == "__main__":
    main(measure)
