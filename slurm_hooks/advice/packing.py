"""What is published of packing: families of one GPU whose own runs can share one, for a note on arrays."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from advisor.decisions.packing import PackingAdvice
from advisor.packing.evidence import packing_families, rules_of
from advisor.packing.partners import packing_alone
from advisor.packing.text import packing_command, packing_sentence, packing_time
from advisor.service import Trained
from almanac.config import Config
from slurm_hooks.advice.packing_file import PackingRow, render_packing

SHARED_GPUS = 1
"""Of a task of almanac-pack, which sees one GPU."""


def packing_rows(
    history: pd.DataFrame, trained: Trained | None, config: Config, now_s: int
) -> dict[str, list[PackingRow]]:
    """By user the rows of their packing file, the newest family first. Users without any are not there.

    history: all of these users' jobs, load_history(..., running=True).
    """
    if trained is None or not config.packing.advise:
        return {}
    rules, found = rules_of(config), defaultdict(list)
    small = history[history["gpu_count"] == SHARED_GPUS]
    families = packing_families(small, trained.calibration, config, now_s)
    for family in sorted(families, key=lambda each: (-each.newest_s, each.key)):
        advice = packing_alone(family, rules)
        if advice.is_advised:
            found[family.user].append(_row(advice))
    return dict(found)


def _row(advice: PackingAdvice) -> PackingRow:
    family = advice.members[0]
    need_mib = math.ceil((advice.needed_mib or 0.0) + advice.rules.headroom_mib)
    text = f"{packing_sentence(advice)} {packing_time(advice)} Use: {packing_command(advice)}"
    return PackingRow(family.name_key, family.gpu_count, need_mib, text)


def packing_content(rows: Sequence[PackingRow], expires_s: int) -> bytes | None:
    """One user's file; None where there is nothing to say."""
    return render_packing(expires_s, rows) if rows else None
