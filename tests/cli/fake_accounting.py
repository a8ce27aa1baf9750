"""An accounting that answers sacct's queries as 22.05 does, from rows of the jobs table, and counts them."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm.sacct import COLUMNS

CLUSTER = "test"


@dataclass
class Accounting:
    """rows: of the jobs table; a row without end_s runs. asked: queries by kind. Later than now_s is not known yet."""

    now_s: Callable[[], float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)

    def __call__(self, argv: Sequence[str]) -> bytes:
        if argv[0] == "sacctmgr":
            return f"{CLUSTER}\n".encode()
        if argv[0] == "sinfo":
            return b""
        assert argv[0] == "sacct", f"not expected: {argv}"
        if "--helpformat" in argv:
            return " ".join(COLUMNS).encode()
        rows = self._selected(argv)
        if "--json" in argv:
            self.asked["names"] += 1
            return json.dumps({"jobs": [_json(row) for row in rows]}).encode()
        self.asked["numbers" if "-X" in argv else "steps"] += 1
        delimiter = next(word for word in argv if word.startswith("--delimiter=")).partition("=")[2]
        names = argv[argv.index("-o") + 1].split(",")
        return "".join(delimiter.join(_text(row).get(name, "") for name in names) + "\n" for row in rows).encode()

    def _selected(self, argv: Sequence[str]) -> list[dict[str, Any]]:
        rows = [row for row in self.rows if row["start_s"] is None or row["start_s"] <= self.now_s()]
        rows = [{**row, **_RUNNING} if (row["end_s"] or 0) > self.now_s() else row for row in rows]
        if "-j" in argv:
            ids = set(map(int, argv[argv.index("-j") + 1].split(",")))
            return [row for row in rows if {row["job_id"], row.get("array_job_id")} & ids]
        if "-u" in argv:
            return [row for row in rows if row["user"] == argv[argv.index("-u") + 1]]
        since_s, until_s = (_seconds(argv[argv.index(option) + 1]) for option in ("-S", "-E"))
        return [row for row in rows if row["submit_s"] < until_s and (row["end_s"] is None or row["end_s"] >= since_s)]


_RUNNING = {"end_s": None, "elapsed_s": None, "state": "RUNNING"}


def job(job_id: int, end_s: int, elapsed_s: int = 900, **more: Any) -> dict[str, Any]:
    """A job of one GPU on node n1."""
    start_s = end_s - elapsed_s
    given = {"submit_s": start_s - 60, "start_s": start_s, "end_s": end_s, "elapsed_s": elapsed_s, "user": "ann"}
    return {"job_id": job_id, **given, "gpu_count": 1, "state": "COMPLETED", "name": "train-1", "node": "n1", **more}


def _text(row: dict[str, Any]) -> dict[str, str]:
    array, task = row.get("array_job_id"), row.get("array_task_id")
    shown = f"{array}_{task}" if array is not None and task is not None else str(row["job_id"])
    tres = f"billing=8,cpu=8,gres/gpu={row['gpu_count']},mem=100G,node=1"
    return {
        "Cluster": CLUSTER, "JobIDRaw": str(row["job_id"]), "JobID": shown, "User": row["user"],
        "Account": row.get("account", "ml"),
        "Partition": "gpu", "QOS": "normal", "State": row["state"], "Submit": str(row["submit_s"]),
        "Eligible": str(row["submit_s"]),
        "Start": str(row["start_s"] or "Unknown"), "End": str(row["end_s"] or "Unknown"),
        "ElapsedRaw": str(row["elapsed_s"] or 0), "TimelimitRaw": "240", "NNodes": "1", "NodeList": row["node"],
        "ReqCPUS": "8", "AllocCPUS": "8", "ReqTRES": tres, "AllocTRES": tres if row["start_s"] else "",
        "Constraints": "gpu&hbm80g", "ExitCode": f"{row.get('exit_code', 0)}:0",
        "WorkDir": row.get("folder", ""), "SubmitLine": row.get("line", ""),
    }  # fmt: skip


def _json(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "job_id": row["job_id"], "cluster": CLUSTER, "name": row["name"], "time": {"submission": row["submit_s"]},
        "comment": {"administrator": "", "job": row.get("comment", ""), "system": ""},
    }  # fmt: skip


def _seconds(text: str) -> int:
    return int(dt.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=dt.UTC).timestamp())
