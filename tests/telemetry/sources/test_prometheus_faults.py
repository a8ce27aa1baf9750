"""A server that fails, refuses or lies: what is tried again, what is said, and that no secret is ever said."""

from __future__ import annotations

import json
import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from almanac.config import Prometheus
from almanac.errors import AlmanacError, ConfigError, ServerError
from telemetry.sources.base import Batch
from telemetry.sources.prometheus import PrometheusSource, probe

NOW_S = 1_790_010_000
HOUR_S = 1_790_002_800
Reply = Any
Serve = Callable[[Callable[[str, int], Any]], Any]
SECRETS = ("s3cret-password", "t0ken.value", "fr0m-url")


def matrix(time_s: float, **labels: str) -> str:
    series = {"metric": {"gpu": "0", "Hostname": "n1", **labels}, "values": [[time_s, "5"]]}
    return answer("matrix", [series])


def answer(kind: str, result: list[Any], **more: Any) -> str:
    data = {"resultType": kind, "result": result}
    return json.dumps({"status": "success", "data": data, **more}, separators=(",", ":"))


def refusal(said: str, kind: str = "execution") -> str:
    return json.dumps({"status": "error", "errorType": kind, "error": said})


def healthy(path: str, samples: int = 1) -> str:
    """What a server with one counter and one GPU answers to each of our queries."""
    if "last_over_time" in path:
        return answer("vector", [{"metric": {"__name__": "DCGM_FI_DEV_FB_USED"}, "value": [0, "1"]}])
    end_s, span_s = span_of(path)
    if "count_over_time" in path:
        number = samples * span_s if "FB_USED" in path else 0
        return answer("vector", [{"metric": {}, "value": [0, str(number)]}] if number else [])
    return matrix(end_s - span_s)


def span_of(path: str) -> tuple[int, int]:
    """End and length, s, of a query's range."""
    ends, length = re.search(r"time=(\d+)", path), re.search(r"%5B(\d+)ms%5D", path)
    assert ends and length
    return int(ends[1]), (int(length[1]) - 1) // 1000


@pytest.fixture
def reply() -> type[Any]:
    import importlib.util

    spec = importlib.util.spec_from_file_location("sources_conftest", Path(__file__).with_name("conftest.py"))
    raise AssertionError(spec)
