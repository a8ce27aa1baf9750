"""Print, as JSON, what the pyslurm is that the caller would import.

A program of its own: Slurm's library ends the process that imports pyslurm where it finds no usable slurm.conf.
Standard input: the caller's sys.path, as JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    sys.path[:] = json.load(sys.stdin)
    try:
        import pyslurm
    except Exception as error:  # its import links Slurm's library and reads slurm.conf: anything can come of it
        print(json.dumps({"error": str(error) or type(error).__name__}))
        return
    has_gpus = hasattr(getattr(pyslurm, "Job", None), "gpus")
    print(json.dumps({"version": str(getattr(pyslurm, "__version__", "")), "has_gpus": has_gpus}))


if __name__ == "__main__":
    main()
