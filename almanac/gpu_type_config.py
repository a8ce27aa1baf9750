"""The sections of the configuration on GPU types: [[gpu_types]] and [gpu_advice]. The submit path reads them too."""

from __future__ import annotations

from dataclasses import dataclass

from almanac.submit_config import Tier, TierKind, key


@dataclass(frozen=True)
class GpuType:
    """A GPU type that users can ask for. Exactly one of constraint, gres, and partition selects it."""

    name: str = key("", "name in advice, such as a100")
    constraint: str = key("", "node feature of the type, such as a100")
    gres: str = key("", "GRES type, such as a100 in gpu:a100:4")
    partition: str = key("", "partition of the type")

    @property
    def kind(self) -> TierKind:
        """The key that selects the type."""
        return "constraint" if self.constraint else "gres" if self.gres else "partition"

    @property
    def selector(self) -> str:
        return self.constraint or self.gres or self.partition

    def as_tier(self) -> Tier:
        """The type in the form that almanac.tiers rewrites requests for. It says nothing of memory."""
        return Tier(name=self.name, constraint=self.constraint, gres=self.gres, partition=self.partition)


@dataclass(frozen=True)
class GpuAdvice:
    """Advice on GPU types at submission: which type ends a job first, from run times and current waits."""

    min_gain: float = key(
        0.15, "share of the time until the end that another type must save; below it there is no advice", low=0, high=1
    )
    max_age_s: int = key(600, "age in seconds above which waits are not used", low=30, high=3600)
