"""`almanac doctor` on MIG slices: the tiers that nodes offer, and where requests without a type land."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from almanac.errors import AlmanacError
from almanac.mig import compute_slices
from almanac.slices import is_known_slice
from almanac.units import listed
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from almanac.config import Tier
    from telemetry.slurm.gpu_types import PartitionGpus

NAME = "MIG slices"


def check_slices(app: App) -> Iterator[Check]:
    """Yields nothing where neither Slurm nor the configuration has slices, and where Slurm does not answer."""
    from telemetry.slurm.gpu_types import partition_gpus

    try:
        found = [gpus for gpus in partition_gpus(app.commands) if gpus.is_in_service]
    except AlmanacError:
        return  # the check of Slurm reports it
    types = {kind for gpus in found for kind in gpus.types}
    slices = sorted(kind for kind in types if compute_slices(kind))
    tiers = [tier for tier in app.config.tiers if tier.is_slice]
    if not slices and not tiers:
        return
    checks = [*_check_tiers(tiers, types), *_check_types(slices, app.config.tiers), *_check_mixed(found)]
    yield from checks
    if not checks:
        yield Check(NAME, "ok", f"advised: {', '.join(tier.name for tier in tiers)}")


def _check_tiers(tiers: Sequence[Tier], types: set[str]) -> Iterator[Check]:
    for tier in tiers:
        if not is_known_slice(tier):
            said = f"{tier.name}: {tier.gpu_model} has no MIG profile {tier.gres}"
            yield Check(NAME, "warn", said, "correct gpu_model or gres of this [[tiers]] table")
    absent = [tier.name for tier in tiers if tier.gres and tier.gres not in types]
    if absent:
        said = f"no node in service has the GRES type of {listed(absent, 'tier')}, so almanac does not advise it"
        yield Check(NAME, "warn", said, "resume its nodes, or remove the [[tiers]] table", {"tiers": absent})


def _check_types(slices: Sequence[str], tiers: Sequence[Tier]) -> Iterator[Check]:
    known = {tier.gres for tier in tiers} | {tier.partition for tier in tiers if tier.partition}
    strange = [kind for kind in slices if kind not in known]
    if strange and not any(tier.is_slice and not tier.gres for tier in tiers):
        said = f"no tier names {listed(strange, 'GRES type')} of MIG slices, so almanac does not advise it"
        yield Check(NAME, "warn", said, "describe each one in a [[tiers]] table", {"types": strange})


def _check_mixed(found: Sequence[PartitionGpus]) -> Iterator[Check]:
    """Slurm gives an untyped request whichever GPU it finds first: a slice, beside idle whole GPUs."""
    types: defaultdict[str, set[str]] = defaultdict(set)
    for gpus in found:
        types[gpus.partition].update(gpus.types)
    mixed = [name for name, kinds in sorted(types.items()) if len({bool(compute_slices(kind)) for kind in kinds}) > 1]
    if mixed:
        has = "has" if len(mixed) == 1 else "have"
        said = f"{listed(mixed, 'partition')} {has} whole GPUs and MIG slices: untyped requests land on slices"
        todo = (
            "give requests without a GPU type the type of whole GPUs in job_submit.lua (docs/mig.md), "
            "or move nodes with slices to a partition of their own"
        )
        yield Check(NAME, "warn", said, todo, {"partitions": mixed})
