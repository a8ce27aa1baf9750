"""The rows of many users, on several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

import pandas as pd

from advisor.service import Trained
from almanac.config import Config
from slurm_hooks.advice_file import Row
from slurm_hooks.advice_rows import user_rows
from telemetry.history import UserHistories

CHUNK = 100
"""Users looked at together: enough for LightGBM to be asked seldom, few enough to be held in memory."""
MIN_CHUNKS = 4
"""With fewer, starting processes (1 to 2 s each) costs more than it saves."""

_task: tuple[Trained | None, Config, int]


def rows_by_user(
    histories: UserHistories, users: Sequence[str], trained: Trained | None, config: Config, now_s: int, processes: int
) -> Iterator[dict[str, list[Row]]]:
    """As user_rows of some users after others."""
    chunks = [users[start : start + CHUNK] for start in range(0, len(users), CHUNK)]
    if processes < 2 or len(chunks) < MIN_CHUNKS:
        for chunk in chunks:
            yield user_rows(histories.of(chunk), trained, config, now_s)
        return
    # Not forked: DuckDB and Arrow have threads, whose locks a forked child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (trained, config, now_s)) as pool:
        waiting: list[Future[dict[str, list[Row]]]] = []
        for chunk in chunks:
            if len(waiting) > processes:
                yield waiting.pop(0).result()
            waiting.append(pool.submit(_rows, histories.of(chunk)))
        for future in waiting:
            yield future.result()


def _start(trained: Trained | None, config: Config, now_s: int) -> None:
    global _task
    _task = (trained, config, now_s)
    # Millions of small objects that all live until the chunk is done: looking for garbage among them is a third of
    # the time.
    gc.disable()


def _rows(history: pd.DataFrame) -> dict[str, list[Row]]:
    rows = user_rows(history, *_task)
    gc.collect()
    return rows
