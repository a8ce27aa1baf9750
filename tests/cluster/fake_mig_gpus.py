"""The fake GPUs of one node: one JSON file, changed only as a driver would let it be changed. See fake_mig.py.

The table is written down here a second time, from NVIDIA's `nvidia-smi mig -lgip` and `-lgipp` listings, so that a
mistake in almanac's own table is not repeated by the fake that tests it (test_fake_mig.py compares the two).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IN_USE = "In use by another client"
NO_RESOURCES = "Insufficient Resources"


class DriverError(Exception):
    """A refusal of NVML, with its text."""


class StrangeCallError(Exception):
    """Something that this fake does not know: the test must say more, or the fake must learn it."""


@dataclass(frozen=True)
class Profile:
    """One line of -lgip: starts in the order in which the driver takes them, by the transcripts of NVIDIA's guide."""

    name: str
    profile_id: int
    compute: int
    size: int
    starts: tuple[int, ...]
    most: int
    mib: int
    sms: int


ONES = (6, 4, 5, 0, 1, 2, 3)


def _seven(base: int, mib: tuple[int, int, int, int], sms: tuple[int, ...]) -> dict[str, Profile]:
    """A GPU of 8 memory slices of `base` GB. mib: of an instance of 1, 2, 4 and 8 slices."""
    one, two, four, all_ = mib
    rows = (
        Profile(f"1g.{base}gb", 19, 1, 1, ONES, 7, one, sms[0]),
        Profile(f"1g.{base}gb+me", 20, 1, 1, ONES, 1, one, sms[0]),
        Profile(f"1g.{2 * base}gb", 15, 1, 2, (6, 4, 0, 2), 4, two, sms[1]),
        Profile(f"2g.{2 * base}gb", 14, 2, 2, (4, 0, 2), 3, two, sms[2]),
        Profile(f"3g.{4 * base}gb", 9, 3, 4, (4, 0), 2, four, sms[3]),
        Profile(f"4g.{4 * base}gb", 5, 4, 4, (0,), 1, four, sms[4]),
        Profile(f"7g.{8 * base}gb", 0, 7, 8, (0,), 1, all_, sms[5]),
    )
    return {row.name: row for row in rows}


@dataclass(frozen=True)
class Model:
    """type_name: what Slurm's NVML plugin makes of the name, shortened as sites do."""

    name: str
    type_name: str
    total_mib: int
    compute: int
    slots: int
    profiles: dict[str, Profile]


A30 = {
    row.name: row
    for row in (
        Profile("1g.6gb", 14, 1, 1, (0, 1, 2, 3), 4, 5952, 14),
        Profile("1g.6gb+me", 21, 1, 1, (0, 1, 2, 3), 1, 5952, 14),
        Profile("2g.12gb", 5, 2, 2, (0, 2), 2, 11968, 28),
        Profile("2g.12gb+me", 6, 2, 2, (0, 2), 1, 11968, 28),
        Profile("4g.24gb", 0, 4, 4, (0,), 1, 24000, 56),
    )
}
MODELS = {
    "a100-40": Model("NVIDIA A100-SXM4-40GB", "a100", 40960, 7, 8, _seven(5, (4864, 9856, 19968, 40192),
                                                                          (14, 14, 28, 42, 56, 98))),
    "a100-80": Model("NVIDIA A100-SXM4-80GB", "a100", 81920, 7, 8, _seven(10, (9728, 19968, 40192, 80896),
                                                                          (14, 14, 28, 42, 56, 98))),
    "h100-80": Model("NVIDIA H100 80GB HBM3", "h100", 81559, 7, 8, _seven(10, (9984, 19968, 40192, 80896),
                                                                          (16, 26, 32, 60, 64, 132))),
    "a30-24": Model("NVIDIA A30", "a30", 24576, 4, 4, A30),
}  # fmt: skip


def instance_id(slots: int, size: int, start: int) -> int:
    """Numbered as a binary tree over the memory slices: A100 7g 0, halves 1 and 2, pairs 3 to 6, slices 7 to 13.

    This is what NVIDIA's transcripts for A100 and A30 show; some drivers number otherwise.
    """
    return slots // size - 1 + start // size


class Node:
    """The state of one node while it is locked. Every change is on disk at once, as a driver's is on the GPU."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data
        self.model = MODELS[data["model"]]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        gpus: list[dict[str, Any]] = self.data["gpus"]
        return gpus

    def save(self) -> None:
        """Atomic; the node's gres.conf follows, as slurmd's NVML plugin would see the GPUs."""
        _replace(self.path, json.dumps(self.data, indent=1) + "\n")
        self.write_gres()

    def take_fault(self, kind: str, gpu: int | None = None) -> dict[str, Any] | None:
        """The next planned fault of this kind, counted down; None where there is none."""
        for fault in self.data["faults"]:
            if fault["kind"] == kind and fault.get("gpu") in (None, gpu) and fault["times"] > 0:
                fault["times"] -= 1
                self.save()
                return dict(fault)
        return None

    def profiles(self, gpu: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for instance in self.gpus[gpu]["instances"]:
            counts[instance["profile"]] = counts.get(instance["profile"], 0) + 1
        return counts

    def is_legal(self, gpu: int, profile: Profile, start: int) -> bool:
        rows = [(self.model.profiles[one["profile"]], one["start"]) for one in self.gpus[gpu]["instances"]]
        taken = {slot for row, at in rows for slot in range(at, at + row.size)}
        same = sum(row.name == profile.name for row, _ in rows)
        return (
            start in profile.starts
            and not taken & set(range(start, start + profile.size))
            and sum(row.compute for row, _ in rows) + profile.compute <= self.model.compute
            and same < profile.most
            and not (profile.name.endswith("+me") and any(row.name.endswith("+me") for row, _ in rows))
        )

    def create(self, gpu: int, name: str) -> None:
        """At the start that the driver takes. Raises DriverError where there is no room."""
        profile = self.model.profiles.get(name)
        if profile is None:
            raise DriverError("Invalid Argument")
        if not self.gpus[gpu]["mig"]:
            raise DriverError("Not Supported")
        start = next((at for at in profile.starts if self.is_legal(gpu, profile, at)), None)
        if start is None:
            raise DriverError(NO_RESOURCES)
        number = instance_id(self.model.slots, profile.size, start)
        # By GPU and instance id alone, so it comes back with another profile after a change of layout.
        device = f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, '{}/{}/0'.format(self.gpus[gpu]['uuid'], number))}"
        self.gpus[gpu]["instances"].append({"gi": number, "profile": name, "start": start, "uuid": device})
        self.gpus[gpu]["instances"].sort(key=lambda one: int(one["gi"]))
        self._pause()
        self.save()

    def destroy(self, gpu: int, number: int) -> None:
        """Raises DriverError where the instance is busy."""
        if number in self.busy(gpu) or self.take_fault("in-use", gpu):
            raise DriverError(IN_USE)
        self.gpus[gpu]["instances"] = [one for one in self.gpus[gpu]["instances"] if one["gi"] != number]
        self._pause()
        self.save()

    def set_mode(self, gpu: int, is_enabled: bool) -> None:
        """Pending until the GPU is reset, as on an A100; an H100 takes it at once."""
        if self.gpus[gpu]["instances"]:
            raise DriverError(IN_USE)
        self.gpus[gpu]["pending"] = is_enabled
        if self.data["model"].startswith("h100"):
            self.gpus[gpu]["mig"] = is_enabled
        self.save()

    def reset_all(self) -> None:
        """Raises DriverError where a process holds a GPU, or where so planned."""
        for gpu in range(len(self.gpus)):
            if self.busy(gpu) or self.take_fault("reset-refused", gpu):
                raise DriverError(IN_USE)
        for one in self.gpus:
            one["mig"] = one["pending"]
        self.save()

    def busy(self, gpu: int) -> dict[int, int]:
        """Instance ids (-1: the whole GPU) that a process has open, with its PID."""
        return {int(number): pid for number, pid in self.gpus[gpu].get("busy", {}).items()}

    def _pause(self) -> None:
        time.sleep(self.data.get("op_s", 0.0))

    def gres_lines(self) -> list[str]:
        """One line per type and device: a MIG GPU without instances is none to Slurm."""
        gres = self.data["gres"]
        node, folder, prefix = gres["node"], gres["devices"], gres["type_prefix"]
        whole = prefix.rstrip("_") or self.model.type_name
        lines = []
        for index, gpu in enumerate(self.gpus):
            if not gpu["mig"]:
                lines.append(f"NodeName={node} Name=gpu Type={whole} File={folder}/nvidia{index}")
            for one in gpu["instances"]:
                # Slurm counts by type: equal types must stand together.
                device = f"{folder}/nvidia{1000 + 100 * index + one['gi']}"
                lines.append(f"NodeName={node} Name=gpu Type={prefix}{one['profile']} File={device}")
        return sorted(lines, key=lambda line: (line.split()[2], line))

    def device(self, number: int) -> tuple[str, str]:
        """CUDA's name of a Slurm GPU, by its place in gres.conf, and "GPU.INSTANCE" (a whole GPU: "GPU").

        As slurmd with AutoDetect=nvml has it (gres_common_prep_set_env): an instance's UUID, else the index.
        """
        file = self.gres_lines()[number].rpartition("nvidia")[2]
        minor = int(file)
        if minor < 1000:
            return str(number), str(minor)
        gpu, instance = divmod(minor - 1000, 100)
        [own] = [one for one in self.gpus[gpu]["instances"] if one["gi"] == instance]
        return str(own["uuid"]), f"{gpu}.{instance}"

    def gres(self) -> str:
        """The Gres= of the NodeName line that fits, such as gpu:1g.5gb:7,gpu:a100:3; "" without any."""
        counts: dict[str, int] = {}
        for line in self.gres_lines():
            kind = line.split()[2].removeprefix("Type=")
            counts[kind] = counts.get(kind, 0) + 1
        return ",".join(f"gpu:{kind}:{count}" for kind, count in counts.items())

    def write_gres(self) -> None:
        gres = self.data["gres"]
        if not gres["path"]:
            return
        lines = self.gres_lines()
        for line in lines:
            _make_device(Path(line.partition("File=")[2]))
        path = Path(gres["path"])
        _replace(path, "".join(f"{line}\n" for line in lines))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _make_device(path: Path) -> None:
    """slurmd wants a device node behind File=: one more of /dev/null."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def options_of(argv: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """Values by long name of `-f FILE`, `--config-file FILE` and `--config-file=FILE`."""
    found: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in known:
            raise StrangeCallError(f"unknown option {word!r}: expected one of {sorted(known)}")
        found[known[name]] = value if equals else next(rest, "")
    return found


def bus_id(gpu: int) -> str:
    return f"00000000:{gpu + 1:02X}:00.0"


def new_state(
    model: str,
    gpu_count: int,
    node: str,
    gres_path: str = "",
    devices: str = "/dev",
    type_prefix: str = "",
) -> dict[str, Any]:
    """GPUs without MIG. gres_path "": no gres.conf is written."""
    gpus = []
    for index in range(gpu_count):
        name = uuid.uuid5(uuid.NAMESPACE_DNS, f"{node}.{index}")
        gpus.append({"uuid": f"GPU-{name}", "mig": False, "pending": False, "instances": [], "busy": {}})
    gres = {"path": gres_path, "node": node, "devices": devices, "type_prefix": type_prefix}
    return {"model": model, "op_s": 0.0, "gpus": gpus, "gres": gres, "faults": [], "calls": []}


@contextmanager
def locked(path: Path) -> Iterator[Node]:
    """The node behind a state file; one process at a time."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Node(path, json.loads(path.read_text()))
