"""Families and past jobs for the tests of packing."""

from __future__ import annotations

from typing import Any

from advisor.packing.decide import PackingFamily

GIB = 1024.0


Means = float | tuple[float, ...]


def family(name: str = "train", sm: Means = 0.3, dram: Means = 0.1, bound_gib: float = 10, **changes: Any) -> Any:
    sm, dram = (each if isinstance(each, tuple) else (each,) * 8 for each in (sm, dram))
    usual: dict[str, Any] = {
        "user": "ann", "name_key": name, "gpu_count": 1, "sm": sm, "dram": dram, "coverage": 0.95,
        "bounds_mib": dict.fromkeys((2, 3, 4), bound_gib * GIB), "is_preallocated": False, "gpu_model": "A100-80",
        "capacity_mib": 80 * GIB, "newest_s": 1_750_000_000,
    }  # fmt: skip
    return PackingFamily(**{**usual, **changes})
