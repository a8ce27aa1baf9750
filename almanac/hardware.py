"""Peaks of GPU models, from `hardware.toml`. A model that is not there has no peaks; all else is measured."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from almanac.mig import mig_models
from almanac.units import printable

UNKNOWN_MAX_POWER_W = 2000.0
"""`max_power_w` of a card that is not in the table."""
NEAR = 0.15
"""The memory of a GPU as sold and as measured differ by less than this share: ECC and the driver take some."""
_OF_SLICE = re.compile(r"\s+MIG\s+\S+$", re.I)
"""What NVML appends to the name of a MIG instance: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""


@dataclass(frozen=True)
class GpuModel:
    """Peak rates in flop/s (dense, without sparsity) and bytes/s; None where the device has no such pipe.

    max_power_w: the highest board power. compute_capability: CUDA's, such as 8.0.
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
    compute_capability: float
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


def find_gpu_model(label: str, total_mib: float | None = None, *, is_slice: bool | None = None) -> GpuModel | None:
    """The model of an exporter's modelName label, such as "NVIDIA A100-SXM4-80GB"; None where unknown.

    total_mib: used + free, of the whole GPU or of a MIG instance. A whole GPU must have the model's memory within 15%;
    where one label fits several sizes (V100 without a size), this also picks one. Of a slice the label decides, and the
    memory only tells apart sizes with one label: that of a profile of exactly one of them, within 15%.
    is_slice: None if not known; a slice then has the memory of a profile of this model.
    """
    name = model_text(label)
    fits = [m for m in gpu_models().values() if any(re.fullmatch(p, name, re.I) for p in m.patterns)]
    if total_mib is not None:
        whole = [m for m in fits if abs(total_mib / m.hbm_mib - 1) <= NEAR]
        if is_slice is False or (whole and is_slice is None):
            fits = whole
        elif is_slice is None or len(fits) > 1:
            fits = [m for m in fits if _has_slice(m, total_mib)]
    return fits[0] if len(fits) == 1 else None


def model_text(label: str) -> str:
    """Return an exporter's modelName label without a slice's profile and without control characters."""
    return printable(_OF_SLICE.sub("", label.strip()), 80)


def _has_slice(model: GpuModel, total_mib: float) -> bool:
    """Whether a MIG profile of the model has this memory."""
    mig = mig_models().get(model.name)
    sizes = [profile.memory_gib for profile in mig.profiles if profile.memory_gib] if mig else []
    return any((1 - NEAR) * low * 1024 <= total_mib <= (1 + NEAR) * high * 1024 for low, high in sizes)
