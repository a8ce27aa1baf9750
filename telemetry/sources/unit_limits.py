"""Values that the unit of their metric forbids: a sensor fault, or a metric in another unit than expected."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from almanac.records import Counts
from telemetry.sources.exporters import Metric

_OTHER = {"%": 100.0, "fraction": 100.0, "MiB": 2.0**20, "W": 1000.0}
"""By our unit, its ratio to the one that is easily taken for it: percent and ratio, MiB and bytes, W and mW."""
_Flags = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


def within_unit(
    metric: Metric, value: npt.NDArray[np.float64], series: _Ints, usable: _Flags, counts: Counts
) -> _Flags:
    """Flags of the usable samples to keep; the others of the usable ones are counted, by metric.

    value: in our unit; what is kept may lie above counter.high, up to its ceiling. series: the number of each sample's
    series. If most of a series' values but 0 are wrong and would be right in the other unit, such as percent for a
    ratio, none of them can be believed: a 1 would be 100%, and zeros alone would be an idle GPU. With such a series
    beside it, one of only 0 and 1 may have that unit too.
    """
    counter, factor = metric.counter, _OTHER.get(metric.counter.unit, 1.0)
    keep: _Flags = usable & (value >= counter.low) & (value <= counter.ceiling)
    is_small = (value < metric.least) & (value > 0) if metric.least else np.zeros(1, dtype=bool)
    if keep.all() and not is_small.any():
        return keep
    finite = usable & np.isfinite(value)
    counts.drop(f"not a number: {metric.name}", int(np.sum(usable & ~finite)))
    beyond = finite & ~keep
    odd = beyond | (finite & is_small)
    if not odd.any():
        return keep
    in_other = np.where(value > counter.ceiling, value / factor, value * factor)
    explained = odd & (in_other >= max(counter.low, metric.least)) & (in_other <= counter.ceiling)
    given, number = finite & (value != 0), int(series.max(initial=0)) + 1
    odds, all_given = np.bincount(series[explained], minlength=number), np.bincount(series[given], minlength=number)
    is_foreign = 2 * odds > all_given
    if is_foreign.any():
        telling = given & ~np.isclose(value, metric.scale, rtol=0.01)
        is_foreign |= (np.bincount(series[telling], minlength=number) == 0) & (all_given > 0)
    wrong = finite & (beyond | is_foreign[series])
    examples = value[wrong & odd] / metric.scale
    said = "{:.7g} (expected: {:.7g} to {:.7g})".format(examples[0], *metric.limits) if len(examples) else ""
    counts.drop(f"unit mismatch: {metric.name}", int(wrong.sum()), said)
    return keep & ~wrong
