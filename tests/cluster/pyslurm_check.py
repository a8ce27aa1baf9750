"""The contract of slurm/backend.py, on a real pyslurm and the Slurm that it is built for.

As a command, on a host of a cluster, as root, SlurmUser or an Operator: pyslurm_check.py [--act JOB ...]. It reads;
with --act it also sets the site factors of these pending jobs, and sets them back. Exit code 0: all is kept; 1: not;
77: pyslurm does not work with this Slurm, and nothing was checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from backend_contract import check_acting, check_reading

from almanac.errors import AlmanacError, CommandError, ConfigError
from slurm.commands import SlurmCommands
from slurm.pyslurm_backend import open_pyslurm

NOTHING_CHECKED = 77


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--act", metavar="JOB", type=int, nargs="+", default=[], help="set factors of these, too")
    options = parser.parse_args(argv)
    try:
        backend = open_pyslurm(SlurmCommands())
    except (ConfigError, CommandError) as error:
        print(f"nothing checked: {error}")
        return NOTHING_CHECKED
    try:
        jobs = check_reading(backend)
        if options.act:
            check_acting(backend, options.act)
    except (AssertionError, AlmanacError) as error:
        print(f"{backend.program()}: the contract is broken: {error!r}")
        return 1
    acted = f", {len(options.act)} factors set and set back" if options.act else ""
    print(f"{backend.program()}: the contract is kept ({len(jobs)} pending jobs read{acted})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
