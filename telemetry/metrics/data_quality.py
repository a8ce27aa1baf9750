"""The words of data quality in the column `verdict`: whether a job's data can be used (docs/formulas.md).

telemetry.attribution has further words, for jobs on shared nodes whose GPUs are unknown.
"""

from __future__ import annotations

from typing import Final

OK: Final = "ok"
IDLE: Final = "idle"
SHORT: Final = "short"
STAFF: Final = "staff"
PARTITION: Final = "partition"
LOGIN_NODE: Final = "login node"
NO_TELEMETRY: Final = "no telemetry"
LOW_COVERAGE: Final = "low coverage"
NOT_SUMMARISED: Final = "not summarised"
"""For a job without a row in job_metrics."""
EXCLUDED_BY_SITE: Final = (STAFF, PARTITION, LOGIN_NODE)
"""For jobs that the site does not assess, by its configuration (section filters)."""
