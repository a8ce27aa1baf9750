"""nvidia-mig-parted's apply, assert and export over the fake GPUs: fake_mig.py says what is real and what is not."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_mig_gpus import IN_USE, DriverError, Node, StrangeCallError, bus_id, options_of


class PartedError(Exception):
    """A fault that mig-parted prints before it ends with status 1."""


CONFIG_OPTIONS = {
    "-f": "config-file",
    "--config-file": "config-file",
    "-c": "selected-config",
    "--selected-config": "selected-config",
}
Entry = dict[str, Any]


def selected(argv: Sequence[str], gpu_count: int) -> dict[int, Entry]:
    """The chosen config, by GPU index; as mig-parted, the later entry of a GPU wins. Raises PartedError."""
    options = options_of(argv, CONFIG_OPTIONS)
    if "config-file" not in options:
        raise PartedError("missing required flags 'config-file'")
    try:
        text = sys.stdin.read() if options["config-file"] == "-" else Path(options["config-file"]).read_text()
    except OSError as error:
        raise PartedError(f"error parsing config file: read error: {error}") from None
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise StrangeCallError(f"the fake reads JSON only: {error}") from None
    return entries_of(spec, options.get("selected-config", ""), gpu_count)


def entries_of(spec: Any, name: str, gpu_count: int) -> dict[int, Entry]:
    def wrong(what: str) -> PartedError:
        return PartedError(f"error parsing config file: unmarshal error: {what}")

    if not isinstance(spec, dict) or spec.get("version") != "v1":
        raise wrong("unable to parse with missing 'version' field, or unknown version")
    if extra := set(spec) - {"version", "mig-configs"}:
        raise wrong(f"unexpected field: {extra.pop()}")
    configs = spec.get("mig-configs") or {}
    if not name and len(configs) == 1:
        [name] = configs
    if name not in configs:
        raise PartedError(f"error selecting MIG config: selected mig-config not present: {name}")
    found: dict[int, Entry] = {}
    for entry in configs[name]:
        if extra := set(entry) - {"devices", "mig-enabled", "mig-devices"}:
            raise wrong(f"unexpected field: {extra.pop()}")
        if not {"devices", "mig-enabled"} <= set(entry):
            raise wrong("missing required field: devices or mig-enabled")
        if entry["mig-enabled"] is True and "mig-devices" not in entry:
            raise wrong("missing required field 'mig-devices' when 'mig-enabled' is true")
        if entry["mig-enabled"] is False and entry.get("mig-devices"):
            raise wrong("MIG devices included when 'mig-enabled' is false")
        counts = (entry.get("mig-devices") or {}).values()
        if not isinstance(entry["mig-enabled"], bool) or any(type(count) is not int or count < 0 for count in counts):
            raise wrong("wrong type of mig-enabled or mig-devices")
        devices = range(gpu_count) if entry["devices"] == "all" else entry["devices"]
        found |= {gpu: entry for gpu in devices if gpu in range(gpu_count)}
    return found


def wanted_of(entry: Entry) -> dict[str, int]:
    return {name: count for name, count in (entry.get("mig-devices") or {}).items() if count}


def modes_match(node: Node, entries: dict[int, Entry]) -> bool:
    return len(entries) == len(node.gpus) and all(
        node.gpus[gpu]["mig"] == node.gpus[gpu]["pending"] == entry["mig-enabled"] for gpu, entry in entries.items()
    )


def is_applied(node: Node, entries: dict[int, Entry]) -> bool:
    return modes_match(node, entries) and all(node.profiles(gpu) == wanted_of(entry) for gpu, entry in entries.items())


def clear(node: Node, gpu: int) -> None:
    for one in list(node.gpus[gpu]["instances"]):
        try:
            node.destroy(gpu, one["gi"])
        except DriverError as error:
            profile = node.model.profiles[one["profile"]].profile_id
            raise PartedError(f"error destroying Compute instance for profile '({profile}, 0)': {error}") from None


def apply_modes(node: Node, entries: dict[int, Entry]) -> None:
    for gpu, entry in entries.items():
        try:
            clear(node, gpu)
        except PartedError as error:
            raise PartedError(f"error clearing existing MIG configurations: {error}") from None
        node.set_mode(gpu, entry["mig-enabled"])
    if all(one["mig"] == one["pending"] for one in node.gpus):
        return
    try:
        node.reset_all()
    except DriverError as error:
        sys.stderr.write(
            "The following GPUs could not be reset:\n"
            + "".join(f"  GPU {bus_id(gpu)}: {error}\n" for gpu in entries)
            + f"\n{len(entries)} device is currently being used by one or more other processes (e.g., Fabric Manager, "
            "CUDA application, graphics application such as an X server, or a monitoring application such as another "
            "instance of nvidia-smi). Please first kill all processes using this device and all compute applications "
            "running in the system.\n"
        )
        raise PartedError("error resetting all GPUs: exit status 255") from None


def fill(node: Node, gpu: int, wanted: dict[str, int]) -> None:
    """Tries the orders one after another, as mig-parted does. Raises PartedError with the GPU cleared."""
    flat = sorted(
        (name for name, count in wanted.items() for _ in range(count)),
        key=lambda name: -node.model.profiles[name].size if name in node.model.profiles else 0,
    )
    if len(flat) > node.model.compute:
        clear(node, gpu)  # no order can succeed, and there are too many to try
        raise PartedError("error attempting multiple config orderings: all orderings failed")
    for order in dict.fromkeys(itertools.permutations(flat)):
        clear(node, gpu)
        try:
            for name in order:
                if node.gpus[gpu]["instances"] and node.take_fault("killed", gpu):
                    os.kill(os.getpid(), signal.SIGKILL)
                node.create(gpu, name)
        except DriverError as error:
            log("error", f"Error creating GPU instance for '{name}': {error}")
            continue
        if node.gpus[gpu]["instances"] and node.take_fault("wrong", gpu):
            node.destroy(gpu, node.gpus[gpu]["instances"][-1]["gi"])
        return
    clear(node, gpu)
    raise PartedError("error attempting multiple config orderings: all orderings failed")


def apply_devices(node: Node, entries: dict[int, Entry]) -> None:
    for done, (gpu, entry) in enumerate(sorted(entries.items())):
        if not entry["mig-enabled"] or node.profiles(gpu) == wanted_of(entry):
            continue
        if (done or len(entries) == 1) and node.take_fault("half-applied", gpu):
            clear(node, gpu)
            raise PartedError(f"error setting MIGConfig: error creating GPU instance: {IN_USE}")
        try:
            fill(node, gpu, wanted_of(entry))
        except PartedError as error:
            raise PartedError(f"error setting MIGConfig: {error}") from None


def mig_parted(node: Node, argv: Sequence[str]) -> None:
    command, rest = (argv[0] if argv else ""), argv[1:]
    if command == "apply":
        entries = selected(rest, len(node.gpus))
        try:
            if not modes_match(node, entries):
                apply_modes(node, entries)
            if not is_applied(node, entries):
                apply_devices(node, entries)
        except PartedError as error:
            raise PartedError(f"error applying MIG configuration with hooks: {error}") from None
        print("MIG configuration applied successfully")
    elif command == "assert":
        if not is_applied(node, selected(rest, len(node.gpus))):
            raise PartedError("Assertion failure: selected configuration not currently applied")
        print("Selected MIG configuration currently applied")
    elif command == "export":
        export(node, options_of(rest, {"-o": "output", "--output-format": "output"}).get("output", "yaml"))
    else:
        raise StrangeCallError(f"nvidia-mig-parted {list(argv)}")


def export(node: Node, form: str) -> None:
    rows = [
        {"devices": [gpu], "mig-enabled": one["mig"], "mig-devices": node.profiles(gpu)}
        for gpu, one in enumerate(node.gpus)
    ]
    merged: list[dict[str, Any]] = []
    for row in rows:
        same = [one for one in merged if {**one, "devices": 0} == {**row, "devices": 0}]
        if same:
            same[0]["devices"] += row["devices"]
        else:
            merged.append(row)
    if len(merged) == 1:
        merged[0]["devices"] = "all"
    if form == "json":
        print(json.dumps({"version": "v1", "mig-configs": {"current": merged}}))
        return
    if form != "yaml":
        raise StrangeCallError(f"export -o {form}")
    print("version: v1\nmig-configs:\n  current:")
    for row in merged:
        print(f"  - devices: {row['devices']}\n    mig-enabled: {str(row['mig-enabled']).lower()}")
        counts = row["mig-devices"]
        print("    mig-devices:" + "".join(f"\n      {name}: {counts[name]}" for name in counts) if counts else
              "    mig-devices: {}")  # fmt: skip


def log(level: str, text: str) -> None:
    """As logrus writes without a terminal."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(f"time={json.dumps(stamp)} level={level} msg={json.dumps(text)}\n")
