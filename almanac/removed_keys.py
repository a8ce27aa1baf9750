"""Keys of the configuration that are no longer settings. They are read for one release, and never stop a command.

The table serves the reader, which warns, `almanac doctor`, and docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REMOVED: dict[str, dict[str, str]] = {
    "0.1.0": {
        "dask.host": "the address of dask.interface, or of the default route",
        "dask.local_directory": "temporary-directory in Dask's own configuration",
        "dask.qos": "--qos=... in dask.directives",
        "dask.tls": "always true",
        "dask.wait_s": "always 600",
        "dask.workers": "--engine local, which uses all cores",
        "slurm.max_clock_skew_s": "always 300",
        "bindings.use_squeue": "always true",
        "metrics.window_s": "always 60",
        "metrics.pipe_used_frac": "always 0.005",
        "advice.max_runs": "always 60",
        "advice.spike_margin": "always 0.02",
        "advice.min_relative_spread": "always 0.02",
        "advice.censored_share": "always 0.97",
        "advice.failed_share": "always 0.9",
        "advice.pause_days": "always 30",
        "rolling.decay": "always 0.8",
        "rolling.max_runs": "always 50",
        "training.blend": "always chosen on the validation span",
        "training.coverage": "always 0.8",
        "training.validation_share": "always 0.2",
        "training.max_age_days": "always 14",
        "training.keep_versions": "always 10",
        "training.seed": "always 1",
        "priority.overrun_share": "always 0.5",
        "reports.own_per_run": "always 1000",
        "packing.context_mib": "always 500",
        "packing.min_runs": "always 5",
        "packing.min_coverage": "always 0.7",
        "gpu_advice.max_age_s": "always 600",
        "mail.timeout_s": "always 30",
        "mail.wait_s": "always 1800",
        "mail.array_wait_hours": "always 24",
        "mail.give_up_hours": "always 72",
        "mail.keep_days": "always 90",
        "power.stale_s": "always 1800",
        "power.wake_retries": "always 1",
        "mig.demand_days": "always 7",
        "mig.reservation_hours": "always 2",
        "mig.verify_timeout_s": "always 180",
        "mig.run_s": "always 900",
        "mig_raise.undo_min": "always 10",
        "mig_raise.again_min": "always 60",
        "mig_raise.soon_min": "always 60",
        "mig_raise.jobs_per_run": "always 20",
        "placement.jobs_per_run": "always 20",
        "placement.undo_min": "always 10",
        "placement.again_min": "always 60",
        "placement.requeue_delay_s": "always 121",
        "placement.start_up_s": "always 120",
        "placement.checkpoint_s": "always 300",
        "placement.max_age_s": "always 60",
        "hooks.lifetime_hours": "always 48",
        "mig.job_wait_s": "always 300",
        "mig.command_timeout_s": "always 300",
        "priority.min_gpu_time_s": "always 60",
        "priority.max_gpu_time_s": "always 8640000",
        "prometheus.chunk_minutes": "always 60",
        "prometheus.max_samples": "always 12000000",
        "slurm.overlap_hours": "always 6",
        "rolling.similarity": "always 0.8",
        "metrics.window_alignment": "always utc",
        "metrics.imbalance_counter": "always gpu_util_pct",
        "metrics.spatial_method": "always means",
        "slurm.window_hours": "always 24",
        "prometheus.retries": "always 4",
        "dask.partition": "--partition=... in dask.directives",
        "dask.account": "--account=... in dask.directives",
        "advice.min_runs": "always 5",
        "advice.max_slowdown": "always 1.5",
        "rolling.families": "always mask",
        "packing.min_gain": "always 1.15",
        "gpu_advice.min_gain": "always 0.15",
        "mail.per_user_hour": "always 20",
        "power.nodes_per_run": "always 20",
        "mig.hours_between": "always 24",
        "mig.nodes_at_once": "always 1",
        "advice.history_days": "always 120",
    },
}
"""What stands in the place of each key, by the release that removed it and the key."""
_MOVED = {f"dask.{name}": ("directives", f"--{name}={{}}") for name in ("qos", "partition", "account")}
"""Keys whose value still counts, as an entry of a list in the same section."""
INSTEAD = {key: text for removed in REMOVED.values() for key, text in removed.items()}
_SECTIONS = {key.partition(".")[0] for key in INSTEAD}


def without_removed(data: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return parsed TOML without its removed keys, and their names. A section that lost all its keys is left out."""
    kept: dict[str, Any] = {}
    found: list[str] = []
    for section, content in data.items():
        if isinstance(content, dict):
            gone = [key for key in content if f"{section}.{key}" in INSTEAD]
            found += [f"{section}.{key}" for key in gone]
            content = {key: value for key, value in content.items() if key not in gone} | _moved(section, content)
        if content != {} or section not in _SECTIONS:
            kept[section] = content
    return kept, tuple(found)


def _moved(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """The keys of a section that take the values of removed ones. A value of a wrong type is left out."""
    changed: dict[str, Any] = {}
    for old, (key, form) in _MOVED.items():
        value, present = content.get(old.removeprefix(f"{section}.")), changed.get(key, content.get(key, []))
        if isinstance(value, str) and value and isinstance(present, list):
            changed[key] = [form.format(value), *present]
    return changed


def said_of(removed: Iterable[str]) -> str:
    """Removed keys of a file, each with what stands in its place."""
    return "; ".join(f"{key} ({INSTEAD[key]})" for key in removed)
