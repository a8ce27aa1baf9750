"""Programs in a user's job: the start of almanac-pack without MPS, as the package installs it, and UnequalSampler."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, at_most, main

ROOT = Path(__file__).parents[1]
RUNS = 20
PYTHON = "/usr/bin/python3"  # has Debian's python3-torch
LIMIT_S = 0.3
MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurm_hooks.packing.launcher import main; main()"
NOTE = "import sys, time; sys.stdout.write(repr(time.time()))"


def launcher() -> list[Figure]:
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
    python = [PYTHON, "-IS", "-X", f"pycache_prefix={folder}/compiled"]
    command = [*python, "-c", MAIN, str(ROOT), "--items=0-1", "--", *python, "-c", NOTE]
    before, began_s = os.times(), time.time()
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    ended_s, after = time.time(), os.times()
    first_s = min(float(path.read_text()) for path in folder.glob("slurm-1_*.out"))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return first_s - began_s, ended_s - began_s, cpu


def sampler() -> list[Figure]:
    """UnequalSampler on four gloo ranks, one of them slowed twice, its own cost, and HadarE's copies for comparison."""
    command = [PYTHON, str(Path(__file__).with_name("gloo_training.py"))]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"gloo_training.py failed under {PYTHON} (apt-get install python3-torch?):\n{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])
    ideal_s = measured["ideal_s"]
    unequal, plain = (measured[name][0]["step_s"] / ideal_s for name in ("sampler", "plain"))
    overhead = max(rank["step_s"] for rank in measured["overhead"]) / 0.010
    sizes = "/".join(str(rank["local"]) for rank in measured["sampler"])
    figures = [
        at_most(f"step time of the ideal, batches {sizes} of 128", unequal, 1.15),
        Figure("step time of the ideal, plain DDP", plain),
        at_most("sampler's own time, of a 10 ms step", overhead, 0.01),
    ]
    for how, result in measured["trained"].items():
        label = f"training loss, {how}, {result['steps']:.0f} steps in {result['time_s']:.1f} s (5 seeds)"
        figures.append(Figure(label, result["loss"]))
    return figures


if __name__ == "__main__":
    main(lambda: launcher() + sampler())
