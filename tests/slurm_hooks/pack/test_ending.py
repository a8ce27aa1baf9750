"""The end of a run with several daemons."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import cast

import pytest

from slurm_hooks.pack import ending
from slurm_hooks.pack.ending import end_run
from slurm_hooks.pack.folder import new_token
from slurm_hooks.pack.mps import Mps, MpsTimeoutError
from slurm_hooks.pack.processes import DAEMON_MARK, TASK_MARK

MEETING_S = 20.0


class _Hanging:
    """Answers only once the other daemon is asked, too, and then says that it took too long."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def terminate_clients(self) -> None:
        self._barrier.wait(MEETING_S)
        raise MpsTimeoutError("terminate")

    def quit(self) -> None:
        self._barrier.wait(MEETING_S)
        raise MpsTimeoutError("quit")


def test_no_daemon_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four GPUs that hang, one after the other would take longer than Slurm waits before it kills all."""
    for name in ("AFTER_TERMINATE_S", "AFTER_QUIT_S"):
        monkeypatch.setattr(ending, name, 0.0)
    token, barrier = new_token(""), threading.Barrier(2)
    environ = {**os.environ, TASK_MARK: token, DAEMON_MARK: token}
    environ.pop("SLURM_JOB_ID", None)
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        daemons = cast("list[Mps]", [_Hanging(barrier), _Hanging(barrier)])
        faults = end_run(token, "", daemons, 0.0, must_signal=False)
        assert faults == ["terminate", "terminate", "quit", "quit"]
    assert process.returncode
