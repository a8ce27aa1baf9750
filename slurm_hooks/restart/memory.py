"""Memory of the job's one GPU or MIG instance, as nvidia-smi shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from almanac.errors import CommandError
from slurm_hooks.restart.job import Run

_LISTED_GPU = re.compile(r"GPU [0-9]+: .*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")
_LISTED_MIG = re.compile(r"\s+MIG .*Device +([0-9]+): \(UUID: (MIG-[0-9A-Za-z/-]+)\)")
_MIB = re.compile(r"([0-9]+) MiB")


@dataclass(frozen=True)
class GpuMemory:
    """MiB. capacity_mib: used + free, which on a MIG instance is less than its name says."""

    used_mib: float
    capacity_mib: float


def read_memory(run: Run, environ: Mapping[str, str]) -> GpuMemory | None:
    """None where there is not exactly one GPU or instance, or nvidia-smi does not say.

    Where Slurm confines the job to its devices, nvidia-smi shows only those; otherwise CUDA_VISIBLE_DEVICES names it.
    """
    try:
        shown = run(["nvidia-smi", "-q", "-x"])
        listed = run(["nvidia-smi", "-L"])
        if shown.code or listed.code:
            return None
        devices = _devices(ElementTree.fromstring(shown.stdout), listed.stdout.decode("utf-8", "replace"))
    except (CommandError, ElementTree.ParseError):
        return None
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    if named in devices:
        return devices[named]
    return next(iter(devices.values())) if len(devices) == 1 else _by_index(devices, named)


def _by_index(devices: Mapping[str, GpuMemory | None], named: str) -> GpuMemory | None:
    """By an index among whole GPUs; MIG instances have no index of their own there."""
    names = list(devices)
    is_plain = named.isascii() and named.isdecimal() and not any(name.startswith("MIG-") for name in names)
    return devices[names[int(named)]] if is_plain and int(named) < len(names) else None


def _devices(log: ElementTree.Element, listing: str) -> dict[str, GpuMemory | None]:
    """By UUID; of a GPU with instances, the instances. Both listings have the GPUs in the same order."""
    uuids: list[dict[str, str]] = []
    for line in listing.splitlines():
        if _LISTED_GPU.match(line):
            uuids.append({})
        elif (match := _LISTED_MIG.match(line)) and uuids:
            uuids[-1][match[1]] = match[2]
    found: dict[str, GpuMemory | None] = {}
    for gpu, instances in zip(log.iter("gpu"), uuids, strict=False):
        slices = gpu.findall("mig_devices/mig_device")
        for each in slices:
            uuid = instances.get((each.findtext("index") or "").strip())
            if uuid:
                found[uuid] = _memory_of(each)
        if not slices and not instances:
            found[(gpu.findtext("uuid") or "").strip()] = _memory_of(gpu)
    return found


def _memory_of(device: ElementTree.Element) -> GpuMemory | None:
    values = []
    for name in ("used", "free"):
        match = _MIB.fullmatch((device.findtext(f"fb_memory_usage/{name}") or "").strip())
        values.append(float(match[1]) if match else math.nan)
    used, free = values
    return GpuMemory(used, used + free) if used + free > 0 else None
