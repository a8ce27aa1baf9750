"""HadarE's forked copies, as a reference to measure against: copies train apart, and their weights are averaged.

Source: Hadar and HadarE, section V. A job's total of steps is shared out by throughput at the start of each round; at
its end the parameters are averaged by the steps done. The steps of copies that drift apart are counted as sequential
progress, which they are not: `UnequalSampler` is what to train with.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from almanac.batch_shares import split_batch


def copy_ids(job_id: int, n_copies: int, max_job_count: int) -> list[int]:
    """Return the ids of a job's forked copies, id + i max_job_count: no two jobs share one."""
    if not 0 <= job_id < max_job_count:
        raise ValueError(f"job_id={job_id}: expected 0 to {max_job_count - 1}; raise max_job_count")
    return [job_id + copy * max_job_count for copy in range(n_copies)]


@dataclass
class JobTracker:
    """Steps left of one job and the throughput (steps/s) of each of its copies."""

    total_steps: int
    throughputs: list[float]
    done_steps: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.done_steps = [0] * len(self.throughputs)

    @property
    def left_steps(self) -> int:
        return max(self.total_steps - sum(self.done_steps), 0)

    def shares(self) -> list[int]:
        """Return each copy's steps of the next round: left X_i / sum X by largest remainder; 0 only near the end."""
        return split_batch(self.left_steps, self.throughputs) if self.left_steps else [0] * len(self.throughputs)

    def record(self, steps: Sequence[int], seconds: Sequence[float]) -> None:
        """Add a round's steps; a copy that made none keeps the throughput that was known."""
        for copy, (n_steps, time_s) in enumerate(zip(steps, seconds, strict=True)):
            self.done_steps[copy] += n_steps
            if n_steps and time_s > 0:
                self.throughputs[copy] = n_steps / time_s


def average_copies(model: torch.nn.Module, own_steps: int) -> None:
    """Set every rank's floating-point parameters and buffers to their mean over ranks, weighted by steps done."""
    weight = torch.tensor(float(own_steps), dtype=torch.float64)
    total = weight.clone()
    dist.all_reduce(total)
    if not total.item():
        return
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                part = tensor.double() * weight / total
                dist.all_reduce(part)
                tensor.copy_(part)


def train_forked(
    model: torch.nn.Module, train_step: Callable[[], None], total_steps: int, round_s: float
) -> JobTracker:
    """Train one copy per rank in rounds of at most `round_s` seconds until the copies' steps add up to the total.

    train_step: one optimizer step on this rank's own data. Every rank returns the same tracker.
    """
    tracker = JobTracker(total_steps, [1.0] * dist.get_world_size())
    while tracker.left_steps:
        share, start_s, n_steps = tracker.shares()[dist.get_rank()], time.monotonic(), 0
        while n_steps < share and (n_steps == 0 or time.monotonic() - start_s < round_s):
            train_step()
            n_steps += 1
        pair = torch.tensor([n_steps, time.monotonic() - start_s], dtype=torch.float64)
        everyone = [torch.empty_like(pair) for _ in tracker.throughputs]
        dist.all_gather(everyone, pair)
        average_copies(model, n_steps)
        tracker.record([int(one[0].item()) for one in everyone], [float(one[1].item()) for one in everyone])
    return tracker
