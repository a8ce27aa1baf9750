"""A user who asks about jobs: their queue, accounting, and site."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_accounting import Accounting, job

from almanac.config import Config, Hooks, StoreSection
from almanac.config import Prometheus as PrometheusSection
from almanac.errors import CommandError
from cli.app import App

NOW_S = 1_795_000_000
NOBODY = "http://127.0.0.1:1"


class User(App):
    """alice, who has the uid of this process, and no access to the store."""

    is_operator = False
    caller = "alice"
    may_read_store = False

    def now_s(self) -> int:
        return NOW_S


class Reader(User):
    may_read_store = True


def queued(job_id: int, state: str = "RUNNING", uid: int | None = None, **more: Any) -> dict[str, Any]:
    given = {"job_state": [state], "user_id": os.getuid() if uid is None else uid, "user_name": "alice", "cpus": 8}
    times = {"submit_time": NOW_S - 900, "start_time": NOW_S - 600 if state != "PENDING" else 0, "time_limit": 60}
    gpus = {"tres_alloc_str": "cpu=8,gres/gpu=1,node=1", "gres_detail": ["gpu:1(IDX:2)"], "nodes": "n1"}
    return {"job_id": job_id, "name": "x", **given, **times, **gpus, **more}


QUEUE = [
    queued(50), queued(51, uid=os.getuid() + 1), queued(52, "PENDING", state_reason="Priority", start_time=NOW_S + 60),
    queued(62, array_job_id=60, array_task_id=2), queued(60, "PENDING", array_job_id=60, array_task_string="3-5%1"),
    queued(10, restart_cnt=1), queued(80, start_time=NOW_S + 5, name="x\x1b[31m"),
    queued(70, tres_alloc_str="cpu=8,node=1", gres_detail=[]),
    queued(95, "FAILED", end_time=NOW_S - 5, exit_code=137 << 8), queued(90, "COMPLETED", end_time=NOW_S - 60),
    queued(53, "PENDING", state_reason="JobHeldUser", priority=0),
    queued(54, "PENDING", state_reason="Resources", tres_per_job="gres/gpu:a100:4", tres_alloc_str=""),
]  # fmt: skip


ENDED = [
    job(90, NOW_S - 60, user="alice", gpu_count=0), job(91, NOW_S - 60, 0, user="alice", state="FAILED", exit_code=127),
    job(93, NOW_S - 60, user="alice"), job(93, NOW_S - 10**8, user="alice", state="TIMEOUT"),
    job(94, NOW_S - 60, user="mallory"), job(63, NOW_S - 60, user="alice", array_job_id=60, array_task_id=0),
    job(65, NOW_S - 60, user="alice", array_job_id=60, array_task_id=6),
]  # fmt: skip
"""Accounting's rows. Job 94 is another user's, and 93's number was used before. 65 is not in the store yet."""


def slurm(argv: Sequence[str]) -> bytes:
    if argv[0] == "sacct":
        return Accounting(lambda: NOW_S, ENDED)(argv)
    if argv[0] == "scontrol":
        return b"NEXT_JOB_ID             = 97\n"
    assert argv[:2] == ["squeue", "-a"] and "--json" in argv
    return json.dumps({"jobs": QUEUE}).encode()


def silent(argv: Sequence[str]) -> bytes:
    raise CommandError(f"{argv[0]} timed out after 1 s")


def without(name: str) -> Callable[[Sequence[str]], bytes]:
    return lambda argv: silent(argv) if argv[0] == name else slurm(argv)


def app_of(
    root: Path, kind: type[User] = User, url: str = NOBODY, runner: Callable[[Sequence[str]], bytes] = slurm
) -> User:
    app = kind()
    section = PrometheusSection(url=url, retries=0)
    app.config = dataclasses.replace(
        Config(), prometheus=section, store=StoreSection(path=str(root)), hooks=Hooks(advice_dir=str(root / "none"))
    )
    app.commands = runner  # type: ignore[assignment]
    return app
