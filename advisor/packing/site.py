"""Packing advice for one submission, from its user's families. The families come from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from advisor.decisions.packing import PackingAdvice, PackingFamily, PackingRules, decide_packing
from advisor.memory.calibration import Calibration
from advisor.packing.evidence import packing_families, rules_of
from advisor.packing.partners import packing_alone
from almanac.config import Config, Tier
from almanac.mig import profile_name
from almanac.records import Request
from almanac.tiers import names_any_tier, requested_tier
from almanac.units import DAY_S
from telemetry.history import load_history
from telemetry.store.cluster_store import ClusterStore

RECENT_S = 14 * DAY_S
"""A partner's newest run ended at most so long ago: an older family may never be submitted again."""


@dataclass(frozen=True)
class PackingFinding:
    """Advice for a submission. alone: runs of its own family; best: what to show, `alone` or with another family."""

    alone: PackingAdvice
    best: PackingAdvice


def packing_of_request(
    request: Request,
    families: Sequence[PackingFamily],
    rules: PackingRules,
    tiers: Sequence[Tier],
    now_s: int,
    advised_tier: str | None = None,
) -> PackingFinding | None:
    """None where the user has no ended run of this name and GPU count. Pure.

    An array shares with itself where it can; any other submission with the partner that promises the most work.
    advised_tier: name of the memory tier that the same submission is advised to ask for; the jobs must fit there, too.
    """
    key = request.user, request.name_key, request.gpu_count
    own = next((family for family in families if family.key == key), None)
    if own is None:
        return None
    own = asked_family(own, request, tiers, advised_tier)
    alone = packing_alone(own, rules)
    if alone.is_advised and request.is_array:
        return PackingFinding(alone, alone)
    others = [
        decide_packing((own, each), rules)
        for each in families
        if each.key != key and each.user == request.user and now_s - each.newest_s <= RECENT_S
    ]
    found = [advice for advice in (alone, *others) if advice.is_advised and advice.gain is not None]
    best = max(found, key=lambda advice: advice.gain.low if advice.gain else 0.0, default=alone)
    return PackingFinding(alone, best)


def asked_family(
    family: PackingFamily, request: Request, tiers: Sequence[Tier], advised_tier: str | None = None
) -> PackingFamily:
    """The family with what this submission asks for: its nodes, and the least memory of the GPUs that it may get.

    A submission that names a choice of tiers may get each one, and so may one that names none and is advised none. The
    memory is unknown where a GPU may be of another model than in the family's runs.
    """
    own = requested_tier(request, tiers)
    is_same_type = request.gpu_type != "" and request.gpu_type == family.gpu_type
    whole = [tier for tier in tiers if not tier.is_slice and (not is_same_type or _is_like(tier, family))]
    asked = [tier for tier in tiers if tier is own or tier.name == advised_tier]
    if own is None and (not asked or names_any_tier(request, tiers)):
        asked += whole
    is_other = bool(request.gpu_type) and own is None and not is_same_type
    is_known = family.capacity_mib is not None and not is_other and all(_is_like(tier, family) for tier in asked)
    capacities = [family.capacity_mib or 0.0, *(float(tier.capacity_mib) for tier in asked)]
    is_slice = profile_name(request.gpu_type) is not None or any(tier.is_slice for tier in asked)
    nodes = None if request.may_use_more or family.node_count is None else max(request.node_count, family.node_count)
    return replace(
        family,
        node_count=nodes,
        capacity_mib=min(capacities) if is_known else None,
        is_on_mig=family.is_on_mig or is_slice,
    )


def _is_like(tier: Tier, family: PackingFamily) -> bool:
    """Whether the tier's GPUs are those of the family's runs, possibly with other memory: A100-40 and A100-80.

    A tier without a GPU model is taken at its GRES type; one that names neither passes.
    """
    if tier.gpu_model and family.gpu_model:
        return tier.gpu_model.partition("-")[0] == family.gpu_model.partition("-")[0]
    return not tier.gres or not family.gpu_type or tier.gres == family.gpu_type


def stored_packing(
    store: ClusterStore,
    request: Request,
    calibration: Calibration | None,
    config: Config,
    now_s: int,
    advised_tier: str | None = None,
) -> PackingFinding | None:
    """`packing_of_request` from the user's jobs in the store. Raises StoreError."""
    history = load_history(store, user=request.user, running=True)
    families = packing_families(history, calibration, config, now_s)
    return packing_of_request(request, families, rules_of(config), config.tiers, now_s, advised_tier)
