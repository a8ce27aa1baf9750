"""Data quality: the words of the column `verdict`, excluded jobs, reserved memory, and the reasons of null metrics.

docs/formulas.md explains the words; telemetry.attribution has further ones, for jobs on shared nodes whose GPUs are
unknown. Jobs are excluded as in Cankur et al., II-C. TensorFlow, JAX and some servers take a fixed share of a
GPU at start and keep it: such a peak does not show the need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from almanac.config import Filters
from almanac.errors import ConfigError
from almanac.hardware import gpu_models
from slurm.hostlist import expand

if TYPE_CHECKING:
    from telemetry.attribution.allocations import JobRun

OK: Final = "ok"
IDLE: Final = "idle"
SHORT: Final = "short"
STAFF: Final = "staff"
PARTITION: Final = "partition"
LOGIN_NODE: Final = "login node"
NO_TELEMETRY: Final = "no telemetry"
LOW_COVERAGE: Final = "low coverage"
NOT_SUMMARISED: Final = "not summarised"
"""Verdict of a job without a row in job_metrics."""
EXCLUDED_BY_SITE: Final = (STAFF, PARTITION, LOGIN_NODE)
"""Verdicts of jobs that the site does not assess, by its configuration (section filters)."""


def exclusion(job: JobRun, filters: Filters, login_nodes: frozenset[str]) -> str | None:
    """Say why a job is excluded, whatever its telemetry says (Cankur et al., II-C); None if it is not."""
    if filters.partitions and job.partition not in filters.partitions:
        return PARTITION
    if job.account in filters.staff_accounts:
        return STAFF
    if login_nodes.intersection(job.hosts):
        return LOGIN_NODE
    return SHORT if job.elapsed_s < filters.min_elapsed_s else None


def host_filter(hostlists: Sequence[str]) -> frozenset[str]:
    """Every host of the configured hostlists. Raises ConfigError."""
    try:
        return frozenset(host for text in hostlists for host in expand(text))
    except ValueError as error:
        raise ConfigError(
            f"filters.login_nodes: {error}", "write hostlists such as login[01-04], each as one string"
        ) from error


EARLY_SHARE = 0.1
"""The reservation must stand after this share of the job, at the latest EARLY_LIMIT_S after its start."""
EARLY_LIMIT_S = 600
LATE_SHARE = 0.05
"""The last share of the job is not looked at: memory is given back there."""
FLAT_SHARE = 0.01
"""Share of the capacity by which use may vary between these two times."""
MIN_SAMPLES = 3


@dataclass(frozen=True)
class ReservedShare:
    """A share low..high of the capacity that a framework reserves, context and libraries included.

    pool: what it reserves without these, where they come on top; they take the more of a capacity the smaller it is.
    """

    framework: str
    low: float
    high: float
    source: str
    pool: float | None = None

    def highest_sql(self, capacity_mib: str) -> str:
        """Return SQL for the highest share of this capacity."""
        if self.pool is None:
            return str(self.high)
        return f"greatest({self.high}, {self.pool} + {CONTEXT_MIB}.0 / {capacity_mib})"

    def highest(self, capacity_mib: float) -> float:
        return self.high if self.pool is None else max(self.high, self.pool + CONTEXT_MIB / capacity_mib)


CONTEXT_MIB = 600
"""CUDA's context and libraries on an A100 or H100, at most; on a GPU of 16 GiB or more `high` already holds them."""
RESERVED_SHARES = (
    ReservedShare(
        "JAX", 0.73, 0.79, "JAX documentation, GPU memory allocation: 75% of the GPU's memory by default", 0.75
    ),
    ReservedShare("vLLM", 0.88, 0.93, "vLLM engine arguments: gpu_memory_utilization 0.9 by default"),
    ReservedShare("TensorFlow", 0.93, 1.02, "TensorFlow guide, Use a GPU: maps nearly all of the GPU memory"),
)


def steady_span_ms(start_s: int, end_s: int) -> tuple[int, int]:
    """The part [from, to) of a job, ms, in which a reservation must be flat."""
    elapsed_s = end_s - start_s
    early_s = min(EARLY_LIMIT_S, EARLY_SHARE * elapsed_s)
    return round((start_s + early_s) * 1000), round((end_s - LATE_SHARE * elapsed_s) * 1000)


def flat_sql(steady_samples: str, steady_low_mib: str, peak_mib: str, capacity_mib: str) -> str:
    """Return SQL for whether use stayed within FLAT_SHARE of its peak.

    steady_low_mib: least use in the steady span; peak_mib: highest use at any time. Null if the capacity is unknown, or
    with too few samples to tell.
    """
    is_flat = f"{peak_mib} - {steady_low_mib} <= {FLAT_SHARE} * {capacity_mib}"
    return f"CASE WHEN {steady_samples} >= {MIN_SAMPLES} THEN {is_flat} END"


def preallocated_sql(is_flat: str, peak_mib: str, capacity_mib: str) -> str:
    """Return SQL for whether a flat peak is a share which frameworks reserve; null if such a peak may not be flat."""
    return f"{is_flat} AND ({reserved_share_sql(peak_mib, capacity_mib)})"


def reserved_share_sql(peak_mib: str, capacity_mib: str) -> str:
    """Return SQL for whether a peak is a share of the capacity that frameworks reserve; null if either is unknown."""
    share = f"{peak_mib} / nullif({capacity_mib}, 0)"
    return " OR ".join(f"{share} BETWEEN {kind.low} AND {kind.highest_sql(capacity_mib)}" for kind in RESERVED_SHARES)


def is_reserved_share(peak_frac: float, capacity_mib: float = math.inf) -> bool:
    """Return True if frameworks reserve this share of the capacity; False for NaN."""
    return any(kind.low <= peak_frac <= kind.highest(capacity_mib) for kind in RESERVED_SHARES)


_FEW = "too few samples"


def reasons_sql() -> str:
    """Return SQL for a list of "metric: reason", empty if every metric is known."""
    cases = [*_memory(), *_imbalance(), _energy(), *_classes()]
    return f"CASE WHEN samples = 0 THEN ['all: no samples'] ELSE [x FOR x IN [{', '.join(cases)}] IF x IS NOT NULL] END"


def _case(metric: str, counter: str, number: str, *more: tuple[str, str]) -> str:
    """One metric: its counter is absent, some other condition holds, or there are too few samples."""
    branches = [
        (f"{metric} IS NOT NULL", "NULL"),
        (f"coalesce({number}, 0) = 0", _quoted(metric, f"no {counter} counter")),
    ]
    branches += [(condition, _quoted(metric, why)) for condition, why in more]
    when = " ".join(f"WHEN {condition} THEN {text}" for condition, text in branches)
    return f"CASE {when} ELSE {_quoted(metric, _FEW)} END"


def _quoted(metric: str, why: str) -> str:
    return f"'{metric}: {why}'"


def _memory() -> list[str]:
    return [
        _case("hbm_peak_mib", "HBM", "n_hbm_used_mib", ("verdict <> 'ok'", "the job is set aside")),
        f"CASE WHEN hbm_max_mib IS NOT NULL AND gpu_model IN ({_sharing()})"
        " THEN 'hbm_max_mib: the host shares this memory, and may use a part' END",
        "CASE WHEN hbm_capacity_mib IS NOT NULL THEN NULL"
        " WHEN has_mig THEN 'hbm_peak_frac: used and free memory of the MIG instance not measured together'"
        " ELSE 'hbm_peak_frac: no total memory counter' END",
    ]


def _sharing() -> str:
    """SQL: the models whose memory host programs can use."""
    names = [model.name.replace("'", "''") for model in gpu_models().values() if model.shares_host_memory]
    return ", ".join(f"'{name}'" for name in ["", *names])


def _imbalance() -> list[str]:
    return [
        _case("temporal_imbalance", "activity", "n_activity"),
        _case(
            "spatial_imbalance",
            "activity",
            "n_activity",
            ("gpus_seen = 1", "one GPU"),
            ("max_activity = 0", "never active"),
            ("NOT is_compared OR windows IS NULL", "too few windows with samples of most GPUs"),
        ),
    ]


def _energy() -> str:
    return _case(
        "energy_j",
        "energy",
        "n_energy",
        ("NOT has_cards", "MIG instances share the counter of their GPU"),
        ("raw_energy_j IS NULL AND energy_rejected > 0", "no possible reading"),
    )


def _classes() -> list[str]:
    from telemetry.counters import PIPES  # needs pyarrow, which the client package does not have

    return [
        *(
            _case(
                f"class_{pipe}",
                pipe.upper(),
                f"n_{pipe}_active_frac",
                ("coalesce(n_dram_active_frac, 0) = 0", "no DRAM counter"),
                (f"placed_{pipe} = 0", "no floating-point activity"),
            )
            for pipe in PIPES
        ),
        "CASE WHEN job_class IS NULL AND pipes_used = [] THEN 'job_class: no floating-point pipe used' END",
        _case(
            "mfu_frac",
            "SM clock",
            "n_sm_clock_mhz",
            ("pipes_used = []", "no floating-point pipe used"),
            ("main_pipe IS NULL", "no main pipe"),
            ("NOT has_peak_clock", "clock of the peak not known"),
        ),
    ]
