"""Families and past jobs for the tests of packing."""

from __future__ import annotations

from typing import Any

from advisor.decisions.packing import PackingFamily

GIB = 1024.0


def family(name: str = "train", sm: float = 0.3, dram: float = 0.1, bound_gib: float = 10, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "user": "ann", "name_key": name, "gpu_count": 1, "sm": (sm,) * 8, "dram": (dram,) * 8, "coverage": 0.95,
        "bounds_mib": dict.fromkeys((2, 3, 4), bound_gib * GIB), "is_preallocated": False, "gpu_model": "A100-80",
        "capacity_mib": 80 * GIB, "newest_s": 1_750_000_000,
    }  # fmt: skip
    return PackingFamily(**{**usual, **changes})
