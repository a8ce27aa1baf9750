"""The table of job_defense_shield's alerts in other-tools.md, from alerts.toml.

`python docs/alerts.py FOLDER` reads a site made by `almanac demo --dir FOLDER`. It counts for each alert the users whom
its rules would write to, and writes alert_shares.json.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from almanac.config import Tier
from almanac.config_file import load_config
from almanac.records import Advice, JobRequest, TierAdvice
from reports.job.build import build_runs
from reports.job.conclusions import conclude
from reports.job.evidence import JobContext
from reports.job.facts import facts_of
from reports.job.job_report import JobRow, MetricsRow
from telemetry.site import Site
from telemetry.store.store import Store

DOCS = Path(__file__).parent
SHARES = DOCS / "alert_shares.json"
PAGES = "https://github.com/PrincetonUniversity/job_defense_shield/blob/main/docs/alert"
BEGIN, END = "<!-- alerts -->\n", "<!-- end of alerts -->\n"
AT_ONCE = 500


def alerts() -> dict[str, Any]:
    return tomllib.loads((DOCS / "alerts.toml").read_text(encoding="utf-8"))


def context_of(given: Mapping[str, Any], changes: Mapping[str, Any]) -> JobContext:
    """The job of alerts.toml with these changes; "unknown" is a missing value."""
    row = dict.fromkeys(JobRow.__annotations__) | {"job_id": 1, "submit_s": 1, "name": "x", "user": "ann"}
    job = row | given["job"] | {"gpu_type": "a100"} | changes.get("job", {})
    metrics = given["metrics"] | changes.get("metrics", {}) if job["gpu_count"] else {}
    job = {name: None if value == "unknown" else value for name, value in job.items()}
    advice = None
    if reason := changes.get("advised"):
        tier = TierAdvice("hbm40g", reason, "hbm80g", reason == "smaller", "--constraint=hbm40g")
        advice = Advice(JobRequest("ann", "x"), tier)
    tiers = (Tier("hbm40g", 40_960), Tier("hbm80g", 81_920))
    return JobContext("c", 2_000_000, cast(JobRow, job), tiers, cast(MetricsRow, metrics), advice=advice)


def section(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{_table()}\n{END}{rest.partition(END)[2]}"


def _table() -> str:
    found, shares = alerts(), json.loads(SHARES.read_text(encoding="utf-8"))
    users = shares["users"]
    lines = [
        f"| alert | rules | fires | silent | users of {users} |",
        "|---|---|---|---|---|",
        *(
            f"| [{each['name']}]({PAGES}/{each['page']}.md) | {', '.join(f'`{rule}`' for rule in each['rules'])} | "
            f"{_shown(each['fires'])} | {_shown(each['silent'])} | {shares['told'][each['page']]} |"
            for each in found["alert"]
        ),
    ]
    usual = _shown({name: found[name] for name in ("job", "metrics")})
    return "\n".join([*lines, "", f"All other values of both inputs: {usual}.", ""])


def _shown(changes: Mapping[str, Any]) -> str:
    parts = {**changes.get("job", {}), **changes.get("metrics", {})}
    if "advised" in changes:
        parts["advice on the tier"] = changes["advised"]
    return ", ".join(f"{name} {json.dumps(value).strip(chr(34))}" for name, value in parts.items())


def measure(config_path: Path, store_path: Path) -> dict[str, Any]:
    """Users by alert: those with at least one job that a suggestion of these rules is for."""
    store = Store.open(store_path)
    [cluster] = store.clusters()
    site = Site.of(store.of(cluster), load_config(config_path), _last_s(store.of(cluster)))
    jobs = store.of(cluster).read("jobs", ["job_id", "submit_s", "user", "end_s"]).to_pylist()
    runs = [(row["job_id"], row["submit_s"]) for row in jobs if row["end_s"] is not None]
    told: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for first in range(0, len(runs), AT_ONCE):
        for context in build_runs(site, runs[first : first + AT_ONCE], has_series=False):
            for suggestion in conclude(facts_of(context)).suggestions:
                told[suggestion.rule, context.is_cpu_only].add(context.user)
    found = {
        each["page"]: len(set().union(*(told[rule, _is_cpu_only(each)] for rule in each["rules"])))
        for each in alerts()["alert"]
    }
    return {"users": len({row["user"] for row in jobs}), "jobs": len(runs), "told": found}


def _is_cpu_only(alert: Mapping[str, Any]) -> bool:
    return alert["fires"].get("job", {}).get("gpu_count") == 0


def _last_s(store: Any) -> int:
    return int(max(each for each in store.read("jobs", ["end_s"])["end_s"].to_pylist() if each is not None))


if __name__ == "__main__":
    SHARES.write_text(
        json.dumps(measure(Path(sys.argv[1]) / "almanac.toml", Path(sys.argv[1]) / "store"), indent=1) + "\n"
    )
