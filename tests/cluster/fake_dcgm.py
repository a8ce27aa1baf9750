"""A fake dcgm-exporter for the lab's 16 GPUs, or one node's: its own process, plain HTTP, dcgm-exporter's names.

A GPU is busy while the lab's mapping folder (kept by the shipped Prolog and Epilog) names a job for it. The job says
what it does by a file <profiles>/<job id> that holds a profile's name or its HBM peak in GiB; until then its GPUs are
busy with no memory to speak of, and after GRACE_S they show the default profile. Busy GPUs replay real
H100 counters where the trace is there, and generated ones otherwise; memory and power are scaled to the lab's A100s.

A node with <mig>/<node>/state.json (fake_mig.py) shows the GPUs of that file instead: a GPU with MIG has a series for
each instance, with GPU_I_ID and GPU_I_PROFILE and without the metrics that DCGM has of whole GPUs only. The mapping
folder's file of an instance is <node>/<gpu>.<instance>; with the end .quiet, it makes the instance busy without the
label hpc_job, which almanac's Prolog does not have on nodes with MIG.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_mig_gpus import MODELS, Profile

NODES = ("n1", "n2", "n3", "n4")
GPUS = range(4)
TICK_S = 0.2
RATE_HZ = 10
PROFILES_GIB = {"low": 20.0, "middle": 34.0, "high": 60.0, "full": 77.0, "idle": 0.5}
SILENT = "silent"
"""Profile of a job whose GPUs have no series, as where their exporter is down."""
RESTING = "resting"
"""Profile of a job that holds its GPUs and does nothing."""
DEFAULT_PROFILE = "low"
GRACE_S = 5.0
"""So long after its GPUs were taken, a job without a profile may still write one."""
# Of 400 W (A100) and 700 W (H100), so that a replayed GPU stays below its own limit.
POWER_SCALE = 400 / 700
IDLE_MIB = 4.0
IDLE_W = 60.0

# Our name for a value, dcgm-exporter's metric and its type. Rates come from DCGM as bytes/s, so as gauges.
METRICS = (
    ("gpu_util", "DCGM_FI_DEV_GPU_UTIL", "gauge"),
    ("mem_util", "DCGM_FI_DEV_MEM_COPY_UTIL", "gauge"),
    ("fb_used", "DCGM_FI_DEV_FB_USED", "gauge"),
    ("fb_free", "DCGM_FI_DEV_FB_FREE", "gauge"),
    ("power", "DCGM_FI_DEV_POWER_USAGE", "gauge"),
    ("energy", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter"),
    ("temp", "DCGM_FI_DEV_GPU_TEMP", "gauge"),
    ("sm_clock", "DCGM_FI_DEV_SM_CLOCK", "gauge"),
    ("xid", "DCGM_FI_DEV_XID_ERRORS", "gauge"),
    ("ecc", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "gauge"),
    ("gr_engine", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge"),
    ("sm", "DCGM_FI_PROF_SM_ACTIVE", "gauge"),
    ("fp64", "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "gauge"),
    ("fp32", "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "gauge"),
    ("fp16", "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "gauge"),
    ("tensor", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge"),
    ("dram", "DCGM_FI_PROF_DRAM_ACTIVE", "gauge"),
    ("nvlink_tx", "DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge"),
    ("nvlink_rx", "DCGM_FI_PROF_NVLINK_RX_BYTES", "gauge"),
    ("pcie_tx", "DCGM_FI_PROF_PCIE_TX_BYTES", "gauge"),
    ("pcie_rx", "DCGM_FI_PROF_PCIE_RX_BYTES", "gauge"),
)
# dcgm-exporter has no value of these for an instance. Power, energy, temperature and clock are the card's, on each.
WHOLE_ONLY = {"gpu_util", "mem_util", "nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx"}
IDLE = {name: 0.0 for name, _, _ in METRICS} | {"power": IDLE_W, "temp": 30.0, "sm_clock": 210.0, "fb_used": IDLE_MIB}

# One sample of a busy GPU; "fill" is the share of the job's peak memory in use.
Sample = Mapping[str, float]
Trace = Callable[[int, float], Sample]


def generated_trace(seed: int = 1) -> Trace:
    """Training-like counters without any file: memory fills in 3 s, activity swings slowly with some noise."""

    def sample(gpu: int, age_s: float) -> Sample:
        noise = random.Random(f"{seed} {gpu} {int(age_s * RATE_HZ)}").uniform(-0.05, 0.05)
        busy = 0.0 if age_s < 3 else 0.65 + 0.15 * math.sin(age_s / 7 + gpu) + noise
        return {
            "fill": min(1.0, 0.1 + age_s / 3),
            "gpu_util": round(min(100.0, 130 * busy)),
            "mem_util": round(50 * busy),
            "power": 120 + 450 * busy,
            "temp": 35 + 25 * busy,
            "sm": busy,
            "tensor": 0.3 * busy,
            "dram": 0.5 * busy,
            "fp16": 0.02 * busy,
            "nvlink_tx": 1e10 * busy,
            "nvlink_rx": 1e10 * busy,
            "pcie_tx": 1.2e7 * busy,
            "pcie_rx": 1.5e7 * busy,
        }

    return sample


def recorded_trace(path: Path, run: str = "t2") -> Trace:
    """Real H100 counters at 10 Hz, from where the job begins to fill memory; replayed in a loop.

    The plateau (median) of the recorded memory is the peak; the one spike above it in the recording is cut, so that
    a job of ten seconds reaches the same peak as one of an hour.
    """
    import pyarrow.parquet as pq

    names = {
        "gpu_util_pct": "gpu_util", "mem_util_pct": "mem_util", "power_w": "power", "temp_c": "temp",
        "sm_active": "sm", "tensor_active": "tensor", "dram_active": "dram", "fp16_active": "fp16",
        "nvlink_tx_bytes_s": "nvlink_tx", "nvlink_rx_bytes_s": "nvlink_rx",
        "pcie_tx_bytes_s": "pcie_tx", "pcie_rx_bytes_s": "pcie_rx",
    }  # fmt: skip
    table = pq.read_table(path, filters=[("run", "=", run)], columns=["gpu", "timestamp", "mem_used_mib", *names])
    by_gpu: dict[int, list[Sample]] = {}
    for row in table.sort_by("timestamp").to_pylist():
        if row["gpu"] in by_gpu or row["mem_used_mib"] > 1000:
            sample = {ours: row[theirs] or 0.0 for theirs, ours in names.items()}
            by_gpu.setdefault(row["gpu"], []).append(sample | {"fill": row["mem_used_mib"]})
    for samples in by_gpu.values():
        plateau = sorted(sample["fill"] for sample in samples)[len(samples) // 2]
        samples[:] = [sample | {"fill": min(1.0, sample["fill"] / plateau)} for sample in samples]

    def sample_at(gpu: int, age_s: float) -> Sample:
        samples = by_gpu[gpu % len(by_gpu)]
        return samples[int(age_s * RATE_HZ) % len(samples)]

    return sample_at


@dataclass(frozen=True)
class Hardware:
    """One GPU of a state file, or one instance of it. profile None: the whole GPU."""

    uuid: str
    model: str
    total_mib: float
    instance: int = 0
    profile: Profile | None = None


@dataclass
class Gpu:
    """One fake GPU or MIG instance: who uses it since when, and its counters now. named: the jobs that labels name."""

    node: str
    index: int
    hardware: Hardware | None = None
    jobs: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    since_s: float = 0.0
    values: dict[str, float] = field(default_factory=lambda: dict(IDLE))
    is_silent: bool = False
    is_resting: bool = False
    energy_mj: float = 2.0e11

    @property
    def number(self) -> int:
        return len(GPUS) * NODES.index(self.node) + self.index

    @property
    def is_80g(self) -> bool:
        return self.node in ("n3", "n4")

    @property
    def total_mib(self) -> float:
        if self.hardware is not None:
            return self.hardware.total_mib
        # Used and free together: a driver keeps some of the nominal 40,960 and 81,920 MiB to itself.
        return 81038.0 if self.is_80g else 40339.0

    @property
    def mapping(self) -> str:
        """Its file in the node's mapping folder."""
        has_instance = self.hardware is not None and self.hardware.profile is not None
        return f"{self.index}.{self.hardware.instance}" if self.hardware and has_instance else str(self.index)

    def labels(self) -> dict[str, str]:
        uuid = f"GPU-{self.number:08x}-a100-4000-8000-{self.number:012x}"
        model = "NVIDIA A100-SXM4-80GB" if self.is_80g else "NVIDIA A100-SXM4-40GB"
        profile = None if self.hardware is None else self.hardware.profile
        return {
            "gpu": str(self.index),
            "UUID": uuid if self.hardware is None else self.hardware.uuid,
            "pci_bus_id": f"00000000:{self.index + 1:02X}:00.0",
            "device": f"nvidia{self.index}",
            "modelName": model if self.hardware is None else self.hardware.model,
            **({"GPU_I_PROFILE": profile.name} if profile else {}),
            **({"GPU_I_ID": str(self.hardware.instance)} if profile and self.hardware else {}),
            "Hostname": self.node,
        }

    def shows(self, name: str) -> bool:
        return self.hardware is None or self.hardware.profile is None or name not in WHOLE_ONLY

    def advance(self, jobs: tuple[str, ...], peak_mib: float, trace: Trace, now_s: float, dt_s: float) -> None:
        """Moves to now_s; the energy of the last dt_s is that of the power shown during it."""
        self.energy_mj += self.values["power"] * dt_s * 1000
        if jobs != self.jobs:
            self.jobs, self.since_s = jobs, now_s
        values = IDLE | {"power": IDLE_W + int(now_s * 10) % 7 / 10}
        if jobs and not self.is_resting:
            sample = dict(trace(self.number, now_s - self.since_s))
            used = min(sample.pop("fill") * peak_mib, self.total_mib)
            values |= sample | {"fb_used": max(used, IDLE_MIB), "power": sample["power"] * POWER_SCALE}
            # Not in the recording (no FP32 and FP64 counters, no clock): an integer and FP32 share as in training.
            values |= {"gr_engine": sample["gpu_util"] / 100, "fp32": 0.15 * sample["sm"], "fp64": 0.0}
            values["sm_clock"] = 1410.0
        values["fb_used"] = round(values["fb_used"])
        self.values = values | {"fb_free": self.total_mib - values["fb_used"], "energy": round(self.energy_mj)}


def hardware_of(state: dict[str, Any]) -> list[tuple[int, Hardware]]:
    """The GPUs and instances of a state file, with the index of each one's GPU."""
    model, found = MODELS[state["model"]], []
    for index, gpu in enumerate(state["gpus"]):
        if not gpu["mig"]:
            found.append((index, Hardware(gpu["uuid"], model.name, float(model.total_mib - 621))))
        for one in gpu["instances"]:
            profile = model.profiles[one["profile"]]
            found.append((index, Hardware(gpu["uuid"], model.name, float(profile.mib), one["gi"], profile)))
    return found


class Exporter:
    """The GPUs of some nodes, moved on by a clock of their own: energy adds up however often they are scraped.

    mig: folder of <node>/state.json, read again at each tick; None or no file: the node's four GPUs are whole.
    """

    def __init__(
        self, jobs: Path, profiles: Path, trace: Trace, nodes: Sequence[str] = NODES, mig: Path | None = None
    ) -> None:
        self._jobs, self._profiles, self._trace, self._nodes, self._mig = jobs, profiles, trace, nodes, mig
        self._lock = threading.Lock()
        self._last_s = time.time()
        self.gpus = [Gpu(node, index) for node in nodes for index in GPUS]
        self.tick()

    def _follow_layouts(self) -> None:
        """Keep the counters of instances that a new layout leaves; the rest begin again."""
        before = {(gpu.node, gpu.index, gpu.hardware): gpu for gpu in self.gpus}
        wanted: list[tuple[str, int, Hardware | None]] = []
        for node in self._nodes:
            path = None if self._mig is None else self._mig / node / "state.json"
            if path is None or not path.exists():
                wanted += [(node, index, None) for index in GPUS]
            else:
                wanted += [(node, index, one) for index, one in hardware_of(json.loads(path.read_text()))]
        self.gpus = [before.get(each) or Gpu(*each) for each in wanted]

    def _profile(self, job: str) -> str:
        try:
            return (self._profiles / job).read_text().strip()
        except OSError:
            return ""

    def _peak_mib(self, job: str, age_s: float) -> float:
        name = self._profile(job)
        if name in (SILENT, RESTING) or (not name and age_s < GRACE_S):
            return 0.0
        name = name or DEFAULT_PROFILE
        return 1024 * (PROFILES_GIB[name] if name in PROFILES_GIB else float(name))

    def _jobs_on(self, gpu: Gpu, end: str = "") -> tuple[str, ...]:
        try:
            return tuple((self._jobs / gpu.node / f"{gpu.mapping}{end}").read_text().split())
        except OSError:
            return ()

    def tick(self) -> None:
        now_s = time.time()
        with self._lock:
            self._follow_layouts()
            for gpu in self.gpus:
                gpu.named = self._jobs_on(gpu)
                jobs = gpu.named + self._jobs_on(gpu, ".quiet")
                age_s = now_s - gpu.since_s if jobs == gpu.jobs else 0.0
                gpu.is_silent = SILENT in map(self._profile, jobs)
                gpu.is_resting = RESTING in map(self._profile, jobs)
                peak_mib = max((self._peak_mib(job, age_s) for job in jobs), default=0.0)
                gpu.advance(jobs, peak_mib, self._trace, now_s, now_s - self._last_s)
            self._last_s = now_s

    def render(self) -> str:
        """Prometheus' text format; a GPU of several jobs has a series for each, as dcgm-exporter's have."""
        lines = []
        with self._lock:
            for name, metric, kind in METRICS:
                lines += [f"# HELP {metric} {name} of the lab's fake GPUs", f"# TYPE {metric} {kind}"]
                for gpu in (gpu for gpu in self.gpus if gpu.shows(name) and not gpu.is_silent):
                    for job in gpu.named or (None,):
                        labels = gpu.labels() | ({"hpc_job": job} if job else {})
                        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
                        lines.append(f"{metric}{{{shown}}} {gpu.values[name]:.17g}")
        return "\n".join(lines) + "\n"

    def run_forever(self) -> None:
        """Ticks; a fault (an unknown profile) ends the whole process, since standing values would look real."""
        try:
            while True:
                self.tick()
                time.sleep(TICK_S)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def serve(exporter: Exporter, address: str, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exporter.render().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent: a scrape a second would fill the log."""

    threading.Thread(target=exporter.run_forever, daemon=True).start()
    ThreadingHTTPServer((address, port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="127.0.0.1", help="address")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--node", choices=NODES, help="only this node's GPUs")
    parser.add_argument("--jobs", type=Path, required=True, help="folder of <node>/<gpu> files with job ids")
    parser.add_argument("--profiles", type=Path, required=True, help="folder of <job id> files with a profile")
    parser.add_argument("--mig", type=Path, help="folder of <node>/state.json of fake_mig.py")
    parser.add_argument("--trace", type=Path, help="parquet of recorded counters; without, generated ones")
    options = parser.parse_args()
    has_trace = options.trace is not None and options.trace.exists()
    trace = recorded_trace(options.trace) if has_trace else generated_trace()
    print(f"replaying {'recorded' if has_trace else 'generated'} counters", flush=True)
    nodes = (options.node,) if options.node else NODES
    serve(Exporter(options.jobs, options.profiles, trace, nodes, options.mig), options.listen, options.port)


if __name__ == "__main__":
    main()
