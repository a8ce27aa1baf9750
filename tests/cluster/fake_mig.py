#!/usr/bin/env python3
"""Plays nvidia-smi and nvidia-mig-parted of one node over a JSON state file, and ends with status 99 on any argument
that it does not know. No GPU, driver or NVML is needed; fake_mig_gpus.py, the GPUs themselves, lies in the same folder.

Set up a node (as root: device nodes are made), then use the two commands as the real ones:

    fake_mig.py STATE init --model a100-40 --gpus 4 --node n1 --gres-conf /etc/slurm/gres-mig.conf --devices /dev
    fake_mig.py STATE install /usr/local/bin          # writes nvidia-smi and nvidia-mig-parted there
    nvidia-mig-parted apply -f config.json -c wanted  # config: JSON (which is YAML), every GPU of the node in it
    nvidia-mig-parted assert -f config.json -c wanted # status 0 or 1
    nvidia-mig-parted export                          # YAML; -o json
    nvidia-smi -L | mig -lgi | mig -lgip | mig -lgipp | mig -lci | -q -x
    nvidia-smi --query-gpu=index,uuid,name,mig.mode.current --format=csv,noheader
    nvidia-smi --query-compute-apps=pid,gpu_uuid,used_memory --format=csv,noheader

After each change gres.conf is what slurmd's NVML plugin would see (include it from gres.conf); `fake_mig.py STATE
gres` prints the Gres= of the NodeName line. Jobs get no MIG UUIDs from it: slurmd takes these from NVML alone, and
mig_site.py's Prolog from `cuda`. Model names: fake_mig_gpus.MODELS. The profile of one slice: 1g.5gb on a100-40.

Make it fail (each --times N, default 1; --gpu G, default any; N=0 takes the plan back):

    fake_mig.py STATE fail in-use          # an instance cannot be destroyed: "In use by another client"
    fake_mig.py STATE fail reset-refused   # the reset after a change of MIG mode is refused
    fake_mig.py STATE fail half-applied    # apply fails between two GPUs: the first ones are changed
    fake_mig.py STATE fail killed          # apply dies by SIGKILL between two instances, and leaves what it made
    fake_mig.py STATE fail wrong           # apply says success, and one instance is missing
    fake_mig.py STATE fail hangs           # the next command sleeps (--seconds, default 3600), then goes on
    fake_mig.py STATE fail driver          # nvidia-smi and mig-parted find no driver
    fake_mig.py STATE busy GPU INSTANCE PID    # a process has the instance (-1: the GPU) open: no destroy, no reset
    fake_mig.py STATE idle                     # no process has anything open
    fake_mig.py STATE slow SECONDS             # every instance takes so long to make and to destroy
    fake_mig.py STATE cuda 0,7                 # what slurmd with NVML tells the job that has these GPUs: see `cuda`
    fake_mig.py STATE calls                    # what was called so far, one JSON list a line
    fake_mig.py STATE show                     # {"0": {"1g.5gb": 7}, "1": null}; null: MIG is off

In Python: `fake_mig.main([state, "nvidia-smi", "-L"])` returns the status.

From mig-parted's source: the form of the config, the exit status, that a config must name every GPU, that a GPU already
as wanted is skipped, that all instances of a changed GPU are destroyed, that a change of mode clears every GPU named
and resets all of the node. From published transcripts: -L, -lgi, -lgipp, "Unable to destroy GPU instance".
Not verified on a real driver: the wording of NVML's refusals in mig-parted's log line, which MIG UUID an instance gets
after a change of layout (here the same for the same instance id), whether --query-compute-apps names the GPU or the
instance (here the GPU), and the exact widths of the -lgip table.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_mig_gpus import Node, StrangeCallError, locked, new_state, options_of
from fake_mig_parted import PartedError, log, mig_parted
from fake_nvidia_smi import smi

STRANGE = 99
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
WRAPPER = '#!/bin/sh\nexec {python} {program} {state} {command} "$@"\n'


FAULTS = ("in-use", "reset-refused", "half-applied", "killed", "wrong", "hangs", "driver")


def init(path: Path, argv: Sequence[str]) -> None:
    words = ("model", "gpus", "node", "gres-conf", "devices", "type-prefix")
    options = options_of(argv, {f"--{word}": word for word in words})
    state = new_state(
        options["model"], int(options["gpus"]), options["node"], options.get("gres-conf", ""),
        options.get("devices", "/dev"), options.get("type-prefix", ""),
    )  # fmt: skip
    Node(path, state).save()


def install(path: Path, folder: Path) -> None:
    for command in ("nvidia-smi", "nvidia-mig-parted"):
        target = folder / command
        target.write_text(
            WRAPPER.format(python=sys.executable, program=Path(__file__).resolve(), state=path, command=command)
        )
        target.chmod(0o755)


def plan_fault(node: Node, kind: str, argv: Sequence[str]) -> None:
    if kind not in FAULTS:
        raise StrangeCallError(f"no fault {kind!r}: expected one of {FAULTS}")
    options = options_of(argv, {"--times": "times", "--gpu": "gpu", "--seconds": "seconds"})
    node.data["faults"] = [fault for fault in node.data["faults"] if fault["kind"] != kind and fault["times"]]
    fault: dict[str, Any] = {"kind": kind, "times": int(options.get("times", "1"))}
    fault |= {"gpu": int(options["gpu"])} if "gpu" in options else {}
    node.data["faults"].append(fault | {"seconds": float(options.get("seconds", "3600"))})


def control(node: Node, command: str, argv: Sequence[str]) -> None:
    if command == "fail" and argv:
        plan_fault(node, argv[0], argv[1:])
    elif command == "busy" and len(argv) == 3:
        node.gpus[int(argv[0])]["busy"][argv[1]] = int(argv[2])
    elif command == "idle" and not argv:
        for one in node.gpus:
            one["busy"] = {}
    elif command == "slow" and len(argv) == 1:
        node.data["op_s"] = float(argv[0])
    elif command == "gres" and not argv:
        print(node.gres())
    elif command == "cuda" and len(argv) == 1:
        devices = [node.device(int(number)) for number in argv[0].split(",")]
        print(",".join(name for name, _ in devices), *(place for _, place in devices))
    elif command == "calls" and not argv:
        print("".join(f"{json.dumps(call)}\n" for call in node.data["calls"]), end="")
    elif command == "show" and not argv:
        shown = {str(gpu): node.profiles(gpu) if one["mig"] else None for gpu, one in enumerate(node.gpus)}
        print(json.dumps(shown))
    else:
        raise StrangeCallError(f"{command} {list(argv)}")
    node.save()


def play(path: Path, command: str, argv: Sequence[str]) -> int:
    """One call of nvidia-smi or nvidia-mig-parted: its status."""
    with locked(path) as node:
        node.data["calls"].append([command, *argv])
        node.save()
        hang = node.take_fault("hangs")
    if hang:
        # Without the lock: a hanging driver does not keep the test from looking.
        time.sleep(hang["seconds"])
    with locked(path) as node:
        if node.take_fault("driver"):
            sys.stderr.write(NO_DRIVER if command == "nvidia-smi" else "")
            if command != "nvidia-smi":
                log("fatal", "error initializing NVML: Driver Not Loaded")
            return 9 if command == "nvidia-smi" else 1
        try:
            (smi if command == "nvidia-smi" else mig_parted)(node, argv)
        except PartedError as error:
            log("fatal", str(error))
            return 1
    return 0


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        sys.stderr.write(str(__doc__))
        return STRANGE
    path, command, rest = Path(argv[0]), argv[1], argv[2:]
    try:
        if command in ("nvidia-smi", "nvidia-mig-parted"):
            return play(path, command, rest)
        if command == "init":
            init(path, rest)
        elif command == "install" and len(rest) == 1:
            install(path, Path(rest[0]))
        else:
            with locked(path) as node:
                control(node, command, rest)
    except StrangeCallError as error:
        sys.stderr.write(f"fake_mig.py: unknown call: {error}\n")
        return STRANGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
