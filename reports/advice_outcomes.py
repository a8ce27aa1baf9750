"""The advice that users' own files gave for their jobs, and if the jobs asked for the advised memory tier."""

from __future__ import annotations

import duckdb

from almanac.units import DAY_S
from telemetry.store.store import ClusterStore

ADVICE_DAYS = 180
"""The store keeps only the rows of a file that changed. A row that has not changed for longer is not found, and counts
for no job. Without a limit, every run would read all that was ever published."""
FOLLOWED, NO_TIER_NAMED, ANOTHER_TIER = "followed", "no tier named", "another tier"
_ADVICE = ("published_s", "user", "kind", "name_key", "gpu_count", "version", "predicted_s", "tier", "expires_s")
_JOBS = ("user", "submit_s", "name_key", "gpu_count", "gpu_count_req", "tier", "state", "start_s", "end_s", "elapsed_s")
_TOLD = f"""
CREATE TEMP TABLE told AS
WITH asked AS (
  -- A job that asked for no GPU, and got some with whole nodes, was told nothing when it was submitted.
  SELECT *, coalesce(gpu_count_req, gpu_count) AS gpus, coalesce(elapsed_s, end_s - start_s) AS ran_s
  FROM jobs WHERE coalesce(gpu_count_req, gpu_count) > 0),
own AS (SELECT * FROM advice SEMI JOIN asked USING ("user")),
files AS (SELECT "user", published_s, version, expires_s FROM own WHERE kind = 'file'),
families AS (SELECT "user", name_key, gpu_count, published_s, predicted_s, tier FROM own WHERE kind = 'F'),
counts AS (SELECT "user", gpu_count, published_s, predicted_s FROM own WHERE kind = 'G'),
met AS (
  SELECT a.tier AS asked_tier, f.tier AS told_tier,
         coalesce(f.predicted_s, g.predicted_s) AS predicted_s, coalesce(nullif(a.gpu_count, 0), a.gpus) AS gpus,
         CASE WHEN a.start_s IS NOT NULL AND a.end_s IS NOT NULL
               AND coalesce(a.state, '') NOT IN ('REQUEUED', 'RESIZING') THEN a.ran_s END AS ran_s
  FROM asked a
  ASOF JOIN files ON a."user" = files."user" AND a.submit_s >= files.published_s
  ASOF LEFT JOIN families f ON a."user" = f."user" AND a.name_key = f.name_key AND a.gpus = f.gpu_count
    AND a.submit_s >= f.published_s
  ASOF LEFT JOIN counts g ON a."user" = g."user" AND a.gpus = g.gpu_count AND a.submit_s >= g.published_s
  WHERE files.version IS NOT NULL AND files.expires_s > a.submit_s)
SELECT *, CASE WHEN told_tier IS NULL OR predicted_s IS NULL THEN NULL WHEN asked_tier = told_tier THEN '{FOLLOWED}'
               WHEN asked_tier IS NULL THEN '{NO_TIER_NAMED}' ELSE '{ANOTHER_TIER}' END AS outcome
FROM met
"""


def load_told(db: duckdb.DuckDBPyConnection, store: ClusterStore, since_s: int, until_s: int) -> None:
    """Make the table `told`: the GPU jobs submitted in a span whose user had a file of their own in force.

    asked_tier, told_tier; outcome: null if no tier was advised; predicted_s; gpus; ran_s: null unless the job ended.
    Raises duckdb.Error.
    """
    store.view(db, "jobs", _JOBS, since_s, until_s)
    store.view(db, "advice", _ADVICE, until_s - ADVICE_DAYS * DAY_S, until_s)
    db.execute(_TOLD).fetchall()
