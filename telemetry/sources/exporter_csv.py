"""The CSV by which dcgm-exporter is told what to export (--collectors, -f): `DCGM field, Prometheus type, help`.

dcgm-exporter refuses a whole file in which one record has not three fields, and skips, with a warning, profiling fields
that a GPU does not have.
"""

from __future__ import annotations

from telemetry.sources.exporters import Metric, presets

FILES = {"almanac-counters.csv": False, "almanac-counters-basic.csv": True}
"""The files of slurm_hooks/exporter, and whether each leaves out the profiling fields."""

_HEAD = """# What almanac reads of dcgm-exporter (--collectors FILE). This list replaces the exporter's own.
# Written by docs/generate.py from telemetry/exporters/dcgm.toml; docs/counters.md says how to install it.
# DCGM field, Prometheus metric type, help message
"""
_DRIVER = "# From the driver: every GPU that DCGM supports"
_PROFILING = "# Profiling fields: data-centre GPUs from Volta on, and CAP_SYS_ADMIN; what a GPU lacks is skipped"


def csv_line(metric: Metric) -> str:
    """The record that switches a metric on. Commas and quotes would be syntax, so the help has none."""
    counter = metric.counter
    kind = "counter" if counter.is_cumulative else "gauge"
    about = counter.about.replace(",", ";").replace('"', "'")
    return f"{metric.name}, {kind}, {about[0].upper()}{about[1:]} ({counter.unit})."


def csv_text(*, is_basic: bool = False) -> str:
    """The whole file. is_basic: without the profiling fields."""
    listed = [metric for metric in presets()["dcgm"].metrics if metric.is_listed]
    lines = [_HEAD, _DRIVER, *(csv_line(metric) for metric in listed if not metric.is_profiling)]
    if not is_basic:
        lines += ["", _PROFILING, *(csv_line(metric) for metric in listed if metric.is_profiling)]
    return "\n".join([*lines, ""])
