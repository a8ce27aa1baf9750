"""Which GPU type a recorded job ran on, by the site's own names, and which hardware a type is.

A site names its types in GRES (gpu:h100) or by node features (--constraint=h100), so a type is called, in this order:
the GRES type that the job was given; the feature that stands for the GPU model that telemetry saw; the one feature that
the job required. A GRES type that spans several models is told apart by their features. MIG slices are no GPU type.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from advisor.duration.features import texts_of
from almanac.hardware import GpuModel, gpu_models
from almanac.submit_config import Tier
from almanac.tiers import required_features

_SLICE = re.compile(r"(^|[._:-])\d+g\.\d+gb", re.I)
_MEMORY = re.compile(r"(?<![0-9])([0-9]{2,3})(?:g|gb)?(?![0-9a-z])", re.I)
_SURE = 0.9
"""A feature stands for a GPU model if this share of the jobs that required it ran on the model (own choice)."""
_MIN_JOBS = 3
_SPANS = 0.05
"""A GRES type spans a model if this share of its jobs ran on it (own choice)."""


@dataclass(frozen=True)
class GpuTypes:
    """Names of a site's GPU types.

    models: by type, the row of the hardware table. features: by GPU model, the feature that stands for it. spread: GRES
    types that span several models. capacities_mib: by type, the least memory of one GPU.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()
    capacities_mib: Mapping[str, float] = field(default_factory=dict)

    def name(self, gpu_type: str, constraints: str, gpu_model: str) -> str:
        """The type that a job ran on; "" where it is unknown, and for a MIG slice."""
        if _SLICE.search(gpu_type):
            return ""
        if gpu_type and gpu_type not in self.spread:
            return gpu_type
        if gpu_model:
            return self.features.get(gpu_model, gpu_model)
        named = sorted(required_features(constraints) & set(self.features.values()))
        return named[0] if len(named) == 1 else ""

    def hardware(self, gpu_type: str) -> GpuModel | None:
        """None where the type is no known GPU model."""
        return gpu_models().get(self.models.get(gpu_type, "")) or find_hardware(gpu_type)

    def capacity_mib(self, gpu_type: str) -> float | None:
        if gpu_type in self.capacities_mib:
            return self.capacities_mib[gpu_type]
        model = self.hardware(gpu_type)
        return float(model.hbm_mib) if model else None

    def to_json(self) -> dict[str, Any]:
        return {
            "models": dict(self.models),
            "features": dict(self.features),
            "spread": sorted(self.spread),
            "capacities_mib": dict(self.capacities_mib),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GpuTypes:
        """Raises KeyError, TypeError, or ValueError for other data."""
        return cls(
            {str(name): str(model) for name, model in data["models"].items()},
            {str(model): str(name) for model, name in data["features"].items()},
            frozenset(map(str, data["spread"])),
            {str(name): float(mib) for name, mib in data["capacities_mib"].items()},
        )


def find_hardware(name: str) -> GpuModel | None:
    """The row of the hardware table that a type's name means: "h100", "a100_80g", "gpu-v100".

    Of several sizes the one that the name states, else the smallest. None where the name holds no model, or several.
    """
    text = name.lower()
    found = [
        model
        for key, model in gpu_models().items()
        if re.search(rf"(?<![a-z0-9]){re.escape(key.split('-')[0].lower())}(?![0-9])", text)
    ]
    if len({model.name.split("-")[0] for model in found}) != 1:
        return None
    sizes = {int(size) for size in _MEMORY.findall(text)}
    stated = [model for model in found if round(model.hbm_mib / 1024) in sizes]
    return min(stated or found, key=lambda model: (model.hbm_mib, -model.hbm_bytes_per_s))


def learn_types(jobs: pd.DataFrame, tiers: Sequence[Tier] = ()) -> GpuTypes:
    """The types that jobs of the site were given. jobs: columns gpu_type, constraints, gpu_model, hbm_capacity_mib.

    tiers: a tier's feature is known even before a job ran there.
    """
    columns = [texts_of(jobs[name]) for name in ("gpu_type", "constraints", "gpu_model")]
    counts = Counter(zip(*columns, strict=True))
    by_type: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_feature: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (gpu_type, constraints, model), number in counts.items():
        if _SLICE.search(gpu_type):
            continue
        if model and gpu_type:
            by_type[gpu_type][model] += number
        for feature in required_features(constraints):
            by_feature[feature][model] += number
    spread = frozenset(name for name, models in by_type.items() if _spans_several(models))
    features = _features(by_feature, tiers)
    models = {name: seen.most_common(1)[0][0] for name, seen in by_type.items() if name not in spread}
    models |= {feature: model for model, feature in features.items() if model in gpu_models()}
    named = GpuTypes(models, features, spread)
    return GpuTypes(models, features, spread, _capacities(jobs, columns, named))


def _spans_several(models: Counter[str]) -> bool:
    enough = [number for number in models.values() if number >= max(_MIN_JOBS, _SPANS * models.total())]
    return len(enough) > 1


def _features(by_feature: Mapping[str, Counter[str]], tiers: Sequence[Tier]) -> dict[str, str]:
    """By GPU model the feature that stands for it: one that reads like it, else the one most jobs required.

    Without telemetry a feature that reads like a model stands for that.
    """
    found: defaultdict[str, list[tuple[bool, int, str]]] = defaultdict(list)
    for feature in {*by_feature, *(tier.constraint for tier in tiers if tier.constraint)}:
        seen = Counter({model: number for model, number in by_feature.get(feature, Counter()).items() if model})
        meant = find_hardware(feature)
        if seen.total() >= _MIN_JOBS:
            model, number = seen.most_common(1)[0]
            if number >= _SURE * seen.total():
                found[model].append((meant is not None and _alike(meant.name, model), number, feature))
        elif meant is not None:
            found[meant.name].append((True, by_feature.get(feature, Counter()).total(), feature))
    return {model: max(names, key=lambda each: (*each[:2], each[2]))[2] for model, names in found.items()}


def _alike(one: str, other: str) -> bool:
    return one.split("-")[0] == other.split("-")[0]


def _capacities(jobs: pd.DataFrame, columns: Sequence[Sequence[str]], types: GpuTypes) -> dict[str, float]:
    names = [types.name(*row) for row in zip(*columns, strict=True)]
    known = pd.Series(jobs["hbm_capacity_mib"].astype("float64").to_numpy()).groupby(names).min()
    return {str(name): float(mib) for name, mib in known.items() if name and mib > 0}
