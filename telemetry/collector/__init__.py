"""almanac-collect, an exporter of GPU counters for compute nodes: NVML's values under dcgm-exporter's names."""

__all__ = ("main",)
