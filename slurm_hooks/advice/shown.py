"""The advice of the advice files, for users without access to the store: the same advice with fewer reasons."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.explain import NO_GPU_LINE, family_text, on_gpus, pilot_line, request_table, tier_table, with_tier, wrapped
from advisor.memory.tier import NO_EVIDENCE, NO_GPU, NO_TIERS, ONE_GPU, decide_tier
from almanac.published.files import in_force
from almanac.records import SITE_FACTOR_KEY, JobRequest, MemoryBound, TierAdvice
from almanac.submit_config import SITE
from almanac.tiers import requested_tier
from almanac.units import format_duration, format_gib, format_moment
from slurm_hooks.advice.file import ADVICE, USER, AdviceFile, AdviceMatch, AdviceRow, look_up


@dataclass(frozen=True)
class Shown:
    """A submission, its row of an advice file (None: none), and the tier that follows from the row.

    unknown: members of the files that this release does not know.
    """

    request: JobRequest
    found: AdviceMatch | None
    tier: TierAdvice
    unknown: tuple[str, ...] = ()

    @property
    def is_silent(self) -> bool:
        """True if the files say nothing about the job's memory."""
        row = self.found.row if self.found else None
        return row is None or (row.bound_mib is None and not row.text)


def from_files(request: JobRequest, user: AdviceFile | None, site: AdviceFile | None) -> Shown:
    if request.gpu_count <= 0:
        return Shown(request, None, TierAdvice(None, NO_GPU))
    found = look_up(user, site, request.name_key, request.gpu_count)
    return Shown(request, found, tier_for(request, found.row, found.file) if found else TierAdvice(None, NO_EVIDENCE))


def read_shown(request: JobRequest, root: Path, uid: int, now_s: int) -> Shown | None:
    """Return the submission's row and tier from the files below root that are usable at now_s; None without a file.

    root: hooks.advice_dir.
    """
    own, site = (in_force(ADVICE, root, name, now_s) for name in (str(uid), SITE))
    if own is None and site is None:
        return None
    shown = from_files(request, own.value if own else None, site.value if site else None)
    return dataclasses.replace(shown, unknown=tuple(name for file in (own, site) if file for name in file.unknown))


def tier_for(request: JobRequest, row: AdviceRow, file: AdviceFile) -> TierAdvice:
    """Decide whether to change the request to the row's tier, as `almanac advise` does."""
    holding = next((tier for tier in file.tiers if tier.name == row.tier), None)
    if holding is None:
        return TierAdvice(None, NO_EVIDENCE if file.tiers else NO_TIERS)
    if holding.is_slice and not request.is_one_gpu and requested_tier(request, file.tiers) != holding:
        return TierAdvice(None, NO_EVIDENCE, note=ONE_GPU)
    # The publisher has counted the headroom: every tier as large as the row's holds the bound. Of slices, it has
    # checked the compute of this one only.
    bound = MemoryBound(holding.capacity_mib, holding.capacity_mib, 0.0, 0.0, 0, "family", "")
    decided = decide_tier(request, bound, file.tiers, 0, slow_downs={holding.name: 1.0})
    return dataclasses.replace(decided, slow_down=None, no_slice="", pilot=row.pilot if decided.tier else None)


def explain(shown: Shown) -> str:
    """Lines of at most 80 columns, without a newline at the end."""
    if shown.tier.reason == NO_GPU:
        return NO_GPU_LINE
    if shown.found is None:
        return wrapped([_memory_line(shown, None), "  predicted time: unknown"])
    row, file = shown.found.row, shown.found.file
    lines = [
        _memory_line(shown, row),
        f"  gain: {gain}" if (gain := _gain(shown, row, file)) else "",
        pilot_line(shown.tier),
        f"  predicted time: {_time(row, shown.request.gpu_count)}",
        f"  failures: {row.checkpoint}" if row.checkpoint else "",
        f"  published: {format_moment(file.written_s)}",
    ]
    return wrapped(lines)


def _time(row: AdviceRow, gpus: int) -> str:
    if row.kind == USER:  # its time only ranks jobs
        return "unknown"
    gpu_time = f", {format_duration(row.predicted_s * gpus)} of GPU-time" if gpus > 1 else ""
    return f"{format_duration(row.predicted_s)}{gpu_time}"


def _memory_line(shown: Shown, row: AdviceRow | None) -> str:
    family = family_text(shown.request)
    if row is None or (row.bound_mib is None and not row.text):
        why = f": {row.why_not}" if row and row.why_not else ""
        return f"almanac: no advice yet for {family}{on_gpus(shown.request.gpu_count)}{why}."
    if not row.text:
        text = f"jobs like {family} need at most {format_gib(row.bound_mib or 0)} per GPU."
        return f"almanac: {with_tier(shown.tier, text)}"
    return f"almanac: {with_tier(shown.tier, row.text) if row.tier else row.text}"


def _gain(shown: Shown, row: AdviceRow, file: AdviceFile) -> str:
    tiers = {tier.name: tier for tier in file.tiers}
    asked, advised = (tiers.get(name or "") for name in (shown.tier.requested_tier, shown.tier.tier))
    return row.gain(asked, advised, shown.request.gpu_count) if shown.tier.is_change else ""


def to_json(shown: Shown) -> dict[str, Any]:
    """The table of advisor.explain.to_json, as far as the files know it; published names the row and its file."""
    request, found = shown.request, shown.found
    row = found.row if found else None
    return {
        "request": request_table(request),
        "tier": tier_table(shown.tier),
        "bound": {"bound_mib": row.bound_mib} if row and row.bound_mib is not None else None,
        "duration": {"duration_s": row.predicted_s, "gpu_time_s": row.predicted_s * request.gpu_count}
        if row and row.kind != USER
        else None,
        "priority": {SITE_FACTOR_KEY: found.site_factor} if found else None,
        "published": _published(found) if found else None,
    }


def _published(found: AdviceMatch) -> dict[str, Any]:
    row, file = found.row, found.file
    return {"kind": row.kind, "text": row.text, "why_not": row.why_not, "gains": row.gains,
            "checkpoint": row.checkpoint,
            "version": file.version, "mode": file.mode,
            "written_s": file.written_s, "expires_s": file.expires_s}  # fmt: skip
