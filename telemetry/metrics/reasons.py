"""Why a metric of a job is null, in words beside it."""

from __future__ import annotations

from telemetry.metrics.catalogue import PIPES

_FEW = "too few samples"


def reasons_sql() -> str:
    """SQL: a list of "metric: reason", empty where every metric is known."""
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
        "CASE WHEN hbm_capacity_mib IS NOT NULL THEN NULL"
        " WHEN has_mig THEN 'hbm_peak_frac: used and free memory of the MIG instance not measured together'"
        " ELSE 'hbm_peak_frac: no total memory counter' END",
    ]


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
    ]
