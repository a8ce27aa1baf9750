"""The rows of many users, on several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

import pandas as pd

from advisor.service import Trained
from almanac.config import Config
from slurm_hooks.advice.rows import UserRows, user_rows
from telemetry.history import UserHistories

CHUNK = 100
"""Users looked at together: enough for LightGBM to be asked seldom, few enough to be held in memory."""
CHUNKS_READ = 4
"""Chunks that are read at once: each reading looks at all rows."""
MIN_USERS = 400
"""With fewer, starting processes (1 to 2 s each) costs more than it saves."""

_task: tuple[Trained | None, Config, int]


def rows_by_user(
    histories: UserHistories, users: Sequence[str], trained: Trained | None, config: Config, now_s: int, processes: int
) -> Iterator[dict[str, UserRows]]:
    """As user_rows of some users after others."""
    chunks = _histories(histories, users)
    if processes < 2 or len(users) < MIN_USERS:
        for history in chunks:
            yield user_rows(history, trained, config, now_s)
        return
    # Not forked: DuckDB and Arrow have threads, whose locks a forked child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (trained, config, now_s)) as pool:
        waiting: list[Future[dict[str, UserRows]]] = []
        for history in chunks:
            if len(waiting) > processes:
                yield waiting.pop(0).result()
            waiting.append(pool.submit(_rows, history))
        for future in waiting:
            yield future.result()


def _histories(histories: UserHistories, users: Sequence[str]) -> Iterator[pd.DataFrame]:
    """The history of CHUNK users after another."""
    many = CHUNK * CHUNKS_READ
    for start in range(0, len(users), many):
        some = users[start : start + many]
        history = histories.of(some)
        for first in range(0, len(some), CHUNK):
            yield history[history["user"].isin(some[first : first + CHUNK])].reset_index(drop=True)


def _start(trained: Trained | None, config: Config, now_s: int) -> None:
    global _task
    _task = (trained, config, now_s)
    # Millions of small objects that all live until the chunk is done: looking for garbage among them is a third of
    # the time.
    gc.disable()


def _rows(history: pd.DataFrame) -> dict[str, UserRows]:
    rows = user_rows(history, *_task)
    gc.collect()
    return rows
