"""UnequalSampler on four gloo ranks, one of them slowed twice, its own cost, and HadarE's copies beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from figures import Figure, at_most, main

PYTHON = "/usr/bin/python3"  # has Debian's python3-torch


def measure() -> list[Figure]:
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
    main(measure)
