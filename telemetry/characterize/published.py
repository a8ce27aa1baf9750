"""What perlmutter-telemetry publishes beyond the headline: the values of its text that belong to a figure."""

from __future__ import annotations

from collections.abc import Iterator

from telemetry.characterize.headline import HOURS, IMBALANCE, PERCENT, RHO, Finding, pipes_share, value_of
from telemetry.characterize.usage import PAPER


def _size(words: str, published: float, table: str, column: str, unit: str, *gpus_from: int) -> Finding:
    return Finding(words, "IV-A", published, table, value_of(column, gpus_from=gpus_from), unit)


def _pipes_util(words: str, published_pct: float, pipes: str) -> Finding:
    read = value_of("mean_gpu_util_pct", rule=PAPER, pipes=pipes, pipes_unknown="")
    return Finding(f"jobs that use {words}: mean GPU_UTIL", "IV-B", published_pct, "fig02_pipe_mix", read, PERCENT)


def _band(word: str, util_pct: int, below: float, above: float | None) -> Iterator[Finding]:
    table, section = ("fig06_spatial_shares", "VI") if word == "spatial" else ("fig07_temporal_shares", "VII")
    band = {0: "below 30%", 30: "30% to 70%", 70: "from 70%"}[util_pct]
    for limit, column, published in (
        ("below 0.3", "share_below_30pct", below),
        ("at least 0.7", "share_at_least_70pct", above),
    ):
        if published is not None:
            read = value_of(column, gpu_util_from_pct=util_pct)
            yield Finding(f"GPU_UTIL {band}: {word} imbalance {limit}", section, published, table, read)


def _medians(word: str, by_pipes: dict[str, float], by_class: dict[str, float]) -> Iterator[Finding]:
    number, section = ("08", "VI") if word == "spatial" else ("09", "VII")
    column = f"p50_{word}_imbalance"
    for pipes, published in by_pipes.items():
        read = value_of(column, rule=PAPER, pipes=pipes, pipes_unknown="")
        only = pipes.replace("+", " and ").replace("fp", "FP")
        words = f"jobs that use only {only}: median"
        yield Finding(words, section, published, f"fig{number}_{word}_by_pipes", read, IMBALANCE)
    for name, published in by_class.items():
        read = value_of(column, class_by="fp64", **{"class": name})
        yield Finding(f"{name}-bound jobs: median", section, published, f"fig{number}_{word}_by_class", read, IMBALANCE)


def _rho(words: str, published: float, counter_a: str, counter_b: str) -> Finding:
    read = value_of("spearman", counter_a=f"mean_{counter_a}", counter_b=f"mean_{counter_b}")
    return Finding(words, "VIII-B", published, "fig11_spearman", read, RHO)


FURTHER = (
    _size("jobs of 3 or 4 GPUs: mean duration", 55 / 60, "fig01_duration", "mean_elapsed_h", HOURS, 3),
    _size("jobs of 3 or 4 GPUs: median GPU_UTIL", 38, "fig01_gpu_util", "p50_gpu_util_pct", PERCENT, 3),
    _size("jobs of 5 to 8 GPUs: median GPU_UTIL", 45, "fig01_gpu_util", "p50_gpu_util_pct", PERCENT, 5),
    _size(
        "jobs of 33 to 512 GPUs: mean GPU_UTIL", 47.5, "fig01_gpu_util", "mean_gpu_util_pct", PERCENT, 33, 65, 129, 257
    ),
    _size("jobs of more than 512 GPUs: median GPU_UTIL", 20, "fig01_gpu_util", "p50_gpu_util_pct", PERCENT, 513),
    pipes_share("jobs that use only FP32", 0.06, "fp32"),
    pipes_share("jobs that use FP32 and tensor", 0.04, "fp32+tensor"),
    pipes_share("jobs that use only tensor", 0.06, "tensor"),
    _pipes_util("only FP64", 36, "fp64"),
    _pipes_util("FP64 and tensor", 50, "fp64+tensor"),
    _pipes_util("only FP32", 34, "fp32"),
    _pipes_util("FP32 and tensor", 46, "fp32+tensor"),
    _pipes_util("only tensor", 20, "tensor"),
    Finding(
        "largest tier: HBM peak at least 90%",
        "IV-C",
        0.17,
        "fig03_hbm_peak_shares",
        value_of("share_at_least_90pct", is_largest_tier=True, reserved="all"),
    ),
    *_band("spatial", 0, 0.34, None),
    *_band("spatial", 30, 0.86, None),
    *_band("temporal", 0, 0.137, None),
    *_band("temporal", 30, 0.065, 0.036),
    Finding(
        "GPU_UTIL from 70%: temporal imbalance at least 0.7",
        "VII",
        0.003,
        "fig07_temporal_shares",
        value_of("share_at_least_70pct", gpu_util_from_pct=70),
    ),
    *_medians(
        "spatial",
        {"tensor": 0.56, "fp32+tensor": 0.28, "fp32": 0.11, "fp64+tensor": 0.14, "fp64": 0.18},
        {"compute": 0.31, "memory": 0.17},
    ),
    *_medians(
        "temporal",
        {"fp64": 0.60, "fp64+tensor": 0.50, "fp32": 0.42, "tensor": 0.40, "fp32+tensor": 0.25},
        {"compute": 0.89, "memory": 0.53},
    ),
    _rho("NVLink sent with NVLink received (rho)", 0.99, "nvlink_tx_bytes_s", "nvlink_rx_bytes_s"),
    _rho("PCIe sent with PCIe received (rho)", 0.73, "pcie_tx_bytes_s", "pcie_rx_bytes_s"),
    _rho("GPU_UTIL with PCIe received (rho)", 0.57, "gpu_util_pct", "pcie_rx_bytes_s"),
    _rho("GPU_UTIL with PCIe sent (rho)", 0.46, "gpu_util_pct", "pcie_tx_bytes_s"),
    _rho("SM_ACTIVE with FP32 (rho)", -0.11, "sm_active_frac", "fp32_active_frac"),
)
"""In the order of the figures; each belongs to the figure of its table."""
