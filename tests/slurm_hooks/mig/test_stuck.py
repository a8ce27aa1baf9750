"""Jobs that a vanished type left in BadConstraints: which are released, and what becomes of a refusal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_hooks.mig.folder import MigFolder, MigState
from slurm_hooks.mig.slurm_side import SlurmSide
from slurm_hooks.mig.stuck import AGAIN_S, release, stuck_jobs
from telemetry.slurm.commands import Done
from telemetry.slurm.gpu_queue import QueuedGpuJob

NOW_S = 1_000_000
BUSY = b"Job update not available right now, the DB index is being set, try again in a bit for job 7\n"
JOB = QueuedGpuJob("7", True, NOW_S - 60, None, 600, 1, "1g.5gb", "", "BadConstraints", True)


@dataclass
class Scontrol:
    """Answers releases with `said` in turn, then with nothing. A release before its log line breaks the promise."""

    said: list[bytes]
    log: Path
    asked: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    reason: str = JOB.reason

    def __call__(self, argv: Sequence[str]) -> bytes:
        assert argv == ["squeue", "-a", "--json", "-j", "7"]
        job = {"job_id": 7, "submit_time": JOB.submit_s, "job_state": ["PENDING"], "state_reason": self.reason}
        more = {"priority": 0, "tres_per_job": "gres/gpu:1g.5gb:1", "tres_req_str": "gres/gpu=1", "time_limit": 10}
        return json.dumps({"jobs": [{**job, **more}]}).encode()

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done:
        assert argv[:2] == ["scontrol", "release"]
        lines = [line for each in self.log.glob("*.jsonl") for line in each.read_text().splitlines()]
        assert any(json.loads(line)["what"] == "release" for line in lines)
        self.asked.append(argv[2])
        said = self.said.pop(0) if self.said else b""
        return Done(int(bool(said)), b"", said)


def released(tmp_path: Path, *said: bytes) -> tuple[Scontrol, MigState, list[str]]:
    scontrol = Scontrol(list(said), tmp_path)
    unused: Any = None
    slurm = SlurmSide(unused, scontrol, 0, scontrol.slept.append)  # type: ignore[arg-type]
    folder = MigFolder(tmp_path)
    state, complaints = release([JOB], slurm, folder, MigState("c"), "c", NOW_S)
    assert folder.load("c").released_s == state.released_s
    return scontrol, state, complaints


def test_a_slurmctld_that_has_just_restarted_is_asked_again(tmp_path: Path) -> None:
    scontrol, state, said = released(tmp_path, BUSY, BUSY)
    assert (scontrol.asked, scontrol.slept, said) == (["7", "7", "7"], [1, 2], [])
    assert list(state.released_s.values()) == [NOW_S]


def test_a_refused_job_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    _, state, said = released(tmp_path, *[b"slurm_suspend error: Access/permission denied\n"] * 9)
    assert said == ["slurm_suspend error: Access/permission denied"]
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + 60).release == (JOB,)


def test_a_released_job_is_left_alone_for_a_day(tmp_path: Path) -> None:
    _, state, _ = released(tmp_path)
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + AGAIN_S - 1).release == ()
    assert stuck_jobs([JOB], {"1g.5gb"}, {"1g.5gb"}, state, NOW_S + AGAIN_S).release == (JOB,)


def test_only_stuck_jobs_of_types_in_service_are_released() -> None:
    others = [
        replace(JOB, reason="JobHeldUser"), replace(JOB, reason="JobHeldAdmin"), replace(JOB, is_held=False),
        replace(JOB, is_pending=False), replace(JOB, gpu_type="a100"),
    ]  # fmt: skip
    found = stuck_jobs([*others, JOB], {"1g.5gb"}, {"2g.10gb"}, MigState("c"), NOW_S)
    assert (found.release, found.wait) == ((), (JOB,))
