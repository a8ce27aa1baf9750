"""The published and chosen numbers of `profile.toml`, typed."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from almanac.units import MINUTE_S  # noqa: F401
