"""MIG slices as memory tiers: what one holds, and its share of a GPU's multiprocessors and memory bandwidth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from almanac.hardware import NEAR
from almanac.mig import Profile, mig_models
from almanac.submit_config import Tier

GIB_MIB = 1024
_MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Memory slices by compute slices, where the name says no more (almanac/mig.toml, geometry.seven)."""


@dataclass(frozen=True)
class SliceShare:
    """The shares of a whole GPU that a slice has: of its multiprocessors, and of its memory bandwidth."""

    sms: float
    bandwidth: float


def slice_models(tier: Tier) -> dict[str, Profile]:
    """The GPU models that a slice can be of, with its profile there: gpu_model, or all that have the profile.

    Empty where gpu_model lacks the profile, or the GRES type ends in no profile.
    """
    models = mig_models()
    named = [models[tier.gpu_model]] if tier.gpu_model in models else [] if tier.gpu_model else list(models.values())
    found = {model.name: model.profile(tier.gres) for model in named if tier.gres}
    return {name: profile for name, profile in found.items() if profile is not None}


def slice_share(tier: Tier, model_name: str) -> SliceShare | None:
    """The slice's shares of a whole GPU of this model; None where that has no MIG slices.

    Where the model's multiprocessors are not published, and for a slice whose name is no profile, the compute slices
    stand for them.
    """
    model = mig_models().get(model_name)
    if model is None or not tier.is_slice:
        return None
    profile = slice_models(tier).get(model_name)
    compute = tier.compute_slices / model.compute_slices
    if profile is None:
        blocks = _MEMORY_SLICES.get(tier.compute_slices, tier.compute_slices)
        return SliceShare(min(compute, 1.0), min(blocks / model.memory_slices, 1.0))
    sms = profile.sms / model.sms if profile.sms and model.sms else compute
    return SliceShare(sms, profile.memory / model.memory_slices)


def real_capacities(tiers: Sequence[Tier], measured_mib: Mapping[str, float] | None = None) -> tuple[Tier, ...]:
    """The tiers, by size, at most as large as their GPUs really are. measured_mib: by GRES type of a slice, and by name
    of another tier.

    A nominal name is no capacity: "1g.10gb" holds 9.5 GiB, and "1g.18gb" 16. Without a measured capacity the least
    published one counts; where none was published, the configured one stays.
    """
    known = measured_mib or {}
    changed = [
        _with_capacity(tier, known.get(tier.gres)) if tier.is_slice else _as_measured(tier, known.get(tier.name))
        for tier in tiers
    ]
    return tuple(sorted(changed, key=lambda tier: (tier.capacity_mib, tier.name)))


def _as_measured(tier: Tier, measured_mib: float | None) -> Tier:
    """A tier of whole GPUs. Its job can have got another GPU, whose memory is not the tier's."""
    is_own = measured_mib is not None and (1 - NEAR) * tier.capacity_mib <= measured_mib < tier.capacity_mib
    return dataclasses.replace(tier, capacity_mib=int(measured_mib)) if measured_mib and is_own else tier


def _with_capacity(tier: Tier, measured_mib: float | None) -> Tier:
    published = [profile.memory_gib[0] for profile in slice_models(tier).values() if profile.memory_gib]
    known_mib = measured_mib or (min(published) * GIB_MIB if published else None)
    if known_mib is None or known_mib >= tier.capacity_mib:
        return tier
    return dataclasses.replace(tier, capacity_mib=int(known_mib))


def is_known_slice(tier: Tier) -> bool:
    """Whether the GRES type's profile exists on the tier's GPU model. True for all but slices."""
    return not tier.is_slice or not tier.gpu_model or not tier.gres or bool(slice_models(tier))
