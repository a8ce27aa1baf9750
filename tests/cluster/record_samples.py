"""Record jobs of every kind as a real Slurm's accounting and queue print them, as fixtures for the parsers.

usage: record_samples.py OUT [--steps]    starts a lab of its own (root), runs the recorder on it, and ends it
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab import SlurmLab

FIXTURES = Path(__file__).resolve().parents[1] / "slurm/fixtures"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--blob", type=Path, help="a JS1: AdminComment for the recorder's jobstats job")
    parser.add_argument("--steps", action="store_true", help="record job steps only")
    options = parser.parse_args()
    recorder = FIXTURES / ("record_steps.sh" if options.steps else "record.sh")
    root = Path(tempfile.mkdtemp(prefix="almanac-record-", dir="/var/tmp"))
    try:
        with SlurmLab(root) as lab:
            blob = {"BLOB": str(options.blob.resolve())} if options.blob else {}
            done = subprocess.run(["bash", recorder, options.out.resolve()], env={**lab.env, **blob}, check=False)
            print(f"recorded in {options.out}" if done.returncode == 0 else f"{recorder}: status {done.returncode}")
            return done.returncode
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
