"""Split one global batch over ranks of unequal speed: largest remainder, caps and damping."""

from collections.abc import Sequence


def split_batch(total: int, weights: Sequence[float], caps: Sequence[int | None] | None = None) -> list[int]:
    """Split `total` samples in proportion to `weights`: at least 1 each, at most the cap, largest remainder.

    With fewer samples than ranks, the ranks of greatest weight get one each and the others 0.
    Raises ValueError where the caps together hold less than `total`, or a weight is not positive.
    """
    n_ranks = len(weights)
    if not n_ranks or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights {list(weights)}: expected positive finite numbers, one per rank")
    limits = [total if cap is None else cap for cap in caps or [None] * n_ranks]
    if len(limits) != n_ranks or min(limits) < min(1, total) or sum(limits) < total:
        raise ValueError(
            f"caps {limits} cannot hold {total} samples on {n_ranks} ranks; raise a cap or lower the batch"
        )
    fastest_first = sorted(range(n_ranks), key=lambda rank: (-weights[rank], rank))
    sizes = [0] * n_ranks
    for rank in fastest_first[:total]:
        sizes[rank] = 1
    if total <= n_ranks:
        return sizes
    return _fill(total, weights, limits)


def _fill(total: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Fix ranks below 1 or above their limit until the rest fits in proportion, then round."""
    fixed: dict[int, int] = {}
    while True:
        free = [rank for rank in range(len(weights)) if rank not in fixed]
        left = total - sum(fixed.values())
        weight_sum = sum(weights[rank] for rank in free)
        quotas = {rank: left * (weights[rank] / weight_sum) for rank in free}
        low = [rank for rank in free if quotas[rank] < 1]
        high = [rank for rank in free if quotas[rank] > limits[rank]]
        lacking = sum(1 - quotas[rank] for rank in low)
        spare = sum(quotas[rank] - limits[rank] for rank in high)
        if not low and not high:
            break
        # Fix the side that is violated more: what the other side needs may change with it.
        if spare >= lacking:
            fixed |= {rank: limits[rank] for rank in high}
        else:
            fixed |= dict.fromkeys(low, 1)
    sizes = {rank: int(quotas[rank]) for rank in free}
    order = sorted(free, key=lambda rank: (sizes[rank] - quotas[rank], rank))
    open_ranks = [rank for rank in order if sizes[rank] < limits[rank]]
    for rank in open_ranks[: left - sum(sizes.values())]:
        sizes[rank] += 1
    return [fixed[rank] if rank in fixed else sizes[rank] for rank in range(len(weights))]


def next_weights(sizes: Sequence[int], sample_times_s: Sequence[float | None]) -> list[float]:
    """Move the batch sizes half of the way to the speeds that the forward times show.

    sample_times_s: seconds per sample of each rank; None where nothing was measured: then the sizes stay.
    """
    times = [time_s for time_s in sample_times_s if time_s is not None and 0 < time_s < float("inf")]
    floored = [float(max(size, 1)) for size in sizes]
    if len(times) < len(sizes):
        return floored
    speeds = [1 / time_s for time_s in times]
    return [(size + sum(floored) * speed / sum(speeds)) / 2 for size, speed in zip(floored, speeds, strict=True)]
