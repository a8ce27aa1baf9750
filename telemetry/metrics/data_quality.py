"""The words that say whether a job's data can be used, in the column `verdict` (docs/formulas.md).

Other words there name why nobody knows which GPUs a job on shared nodes had: telemetry.attribution has them.
"""

from __future__ import annotations

from typing import Final

OK: Final = "ok"
IDLE: Final = "idle"
SHORT: Final = "short"
STAFF: Final = "staff"
NO_TELEMETRY: Final = "no telemetry"
LOW_COVERAGE: Final = "low coverage"
NOT_SUMMARISED: Final = "not summarised"
"""Of a job without a row in job_metrics."""
