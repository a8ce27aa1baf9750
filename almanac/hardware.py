"""Peaks of GPU models, from `hardware.toml`. A model that is not there has no peaks: no verdict, said so."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

UNKNOWN_MAX_POWER_W = 2000.0
"""`max_power_w` of a card that is not in the table."""


@dataclass(frozen=True)
class GpuModel:
    """Peak rates in flop/s (dense, without sparsity) and bytes/s; None where the device has no such pipe.

    max_power_w: the highest board power.
    """

    name: str
    hbm_mib: int
    hbm_bytes_per_s: float
    max_power_w: float
    fp64_flops: float | None
    fp32_flops: float | None
    fp16_flops: float | None
    tensor_flops: float | None
    patterns: tuple[str, ...]
    source: str


@cache
def gpu_models() -> dict[str, GpuModel]:
    """Every known model, by name such as "A100-80"."""
    text = (resources.files("almanac") / "hardware.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    optional = ("fp64_flops", "fp32_flops", "fp16_flops", "tensor_flops")
    return {
        name: GpuModel(name=name, **{**dict.fromkeys(optional), **row, "patterns": tuple(row["patterns"])})
        for name, row in rows.items()
    }


def find_gpu_model(label: str, total_mib: float | None = None) -> GpuModel | None:
    """The model of an exporter's modelName label, such as "NVIDIA A100-SXM4-80GB"; None where unknown.

    Where one label fits several sizes (V100 without a size), total_mib (used + free) picks the nearest
    within 15%.
    """
    fits = [m for m in gpu_models().values() if any(re.fullmatch(p, label.strip(), re.I) for p in m.patterns)]
    if total_mib is not None:
        fits = [m for m in fits if abs(total_mib / m.hbm_mib - 1) <= 0.15]
    return fits[0] if len(fits) == 1 else None
