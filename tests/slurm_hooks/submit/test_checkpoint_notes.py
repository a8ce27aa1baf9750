"""A large job is told at submission how often such jobs meet a failure, once a day for each family."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from advisor.health.checkpoints import CheckpointAdvice, checkpoint_text
from almanac.records import JobRequest
from almanac.submit_config import Priority
from slurm_hooks.advice.file import ADVICE, FAMILY, AdviceFile, AdviceRow
from slurm_hooks.advice.shown import explain, from_files, to_json
from slurm_hooks.submit.dialogue import PromptSubmission, Terminal, consult

TEXT = checkpoint_text(CheckpointAdvice(0.125, 1e5, 2820, 300))
ROW = AdviceRow(FAMILY, 86_400, 5, "train-#", 64, checkpoint=TEXT)


def advice_file(*rows: AdviceRow) -> AdviceFile:
    now_s = int(time.time())
    return AdviceFile("v", now_s, now_s + 3600, "off", False, "ask", Priority(), (), rows)


def submission(name: str = "train-7", gpus: int = 64) -> PromptSubmission:
    return PromptSubmission(JobRequest("ann", name, gpu_count=gpus), {}, lambda: "")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    own = tmp_path / "advice/user" / str(os.getuid())
    own.mkdir(parents=True)
    (own / ADVICE.name).write_bytes(ADVICE.render(advice_file(ROW)))
    return {"HOME": str(tmp_path / "home")}


def test_it_is_said_once_a_day_and_changes_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    said = list[str]()
    terminal = Terminal(said.append, str)
    root = str(tmp_path / "advice")
    assert consult(submission(), environ, terminal, root) == (None, True)
    assert said == [
        "almanac: about 1 in 8 such jobs meets a failure; a checkpoint every 47 min loses\n"
        "         least (5 min each)\n"
    ]  # fmt: skip
    assert consult(submission(), environ, terminal, root) == (None, False)
    assert consult(submission("other-9"), environ, terminal, root) == (None, False)
    assert consult(submission(gpus=8), environ, terminal, root) == (None, False)
    assert consult(submission(), {"HOME": "/dev/null"}, None, root) == (None, False)
    assert len(said) == 1


def test_a_user_without_the_store_reads_the_same_sentence() -> None:
    found = from_files(submission().request, advice_file(ROW), None)
    assert "  failures: about 1 in 8 such jobs meets a failure" in explain(found)
    assert to_json(found)["published"]["checkpoint"] == TEXT
