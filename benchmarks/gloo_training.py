"""Train on ranks of unequal speed over gloo, and print JSON: packing_launcher.py runs this under the Python with
PyTorch.

A sample costs a rank a fixed time of sleep, as a GPU's work costs the host none; the slow rank then spins as long.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "unequal_gpus"))
from batch_shares import split_batch
from gloo_ranks import run
from unequal_sampler import UnequalSampler

N_RANKS, BATCH, SAMPLE_S, N_FEATURES = 4, 128, 0.003, 16


def work(rank: int, n_samples: int, sample_s: float, n_ranks: int = N_RANKS) -> None:
    time.sleep(n_samples * sample_s)
    if rank == n_ranks - 1:
        end_s = time.perf_counter() + n_samples * sample_s
        while time.perf_counter() < end_s:
            pass


def data(n_samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_samples, N_FEATURES, generator=generator)
    return TensorDataset(x, torch.sin(2 * x[:, :4]).sum(1, keepdim=True))


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(N_FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


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


def step_time(rank: int, is_unequal: bool, n_steps: int) -> dict[str, Any]:
    """Median seconds a step over the second half of the steps; a third of a sample's time is the forward pass."""
    model, samples = DistributedDataParallel(network()), data(n_steps * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = UnequalSampler(len(samples), BATCH, replan_steps=10) if is_unequal else None
    equal = BatchSampler(DistributedSampler(samples), BATCH // N_RANKS, drop_last=True)
    times, start_s = [], time.perf_counter()
    for x, y in DataLoader(samples, batch_sampler=sampler or equal):
        if sampler:
            with sampler.forward():
                work(rank, len(x), SAMPLE_S / 3)
                loss = torch.nn.functional.mse_loss(model(x), y)
            loss = sampler.scale(loss)
        else:
            work(rank, len(x), SAMPLE_S / 3)
            loss = torch.nn.functional.mse_loss(model(x), y)
        work(rank, len(x), SAMPLE_S * 2 / 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if sampler:
            sampler.step()
        times.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
    return {"step_s": statistics.median(times[len(times) // 2 :]), "local": len(x)}


def overhead(rank: int) -> dict[str, Any]:
    """Seconds a step that the sampler's own calls take, with two ranks and its exchange every 20 steps."""
    n_steps = 4000
    sampler, loss = UnequalSampler(n_steps * BATCH, BATCH), torch.ones((), requires_grad=True)
    start_s = time.perf_counter()
    for _ in sampler:
        with sampler.forward():
            pass
        sampler.scale(loss)
        sampler.step()
    return {"step_s": (time.perf_counter() - start_s) / n_steps}


def trained(rank: int, how: str, seed: int, time_s: float) -> dict[str, Any]:
    """Training loss after about `time_s` seconds on three ranks, the last at half the speed."""
    sample_s, batch, samples, model = 0.0005, 32, data(4096, 100 + seed), network(seed)
    speeds = [1 / (sample_s * batch)] * 2 + [0.5 / (sample_s * batch)]
    start_s, n_steps = time.perf_counter(), 0
    if how == "copies":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(rank)

        def train_step() -> None:
            rows = torch.randint(len(samples), (batch,), generator=generator)
            work(rank, batch, sample_s, 3)
            x, y = (tensor[rows] for tensor in samples.tensors)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        train_forked(model, train_step, int(sum(speeds) * time_s), 0.5)
        n_steps = int(sum(speeds) * time_s)
    else:
        # The fastest rank alone: the same loop, a group of one.
        parallel = DistributedDataParallel(model) if how == "sampler" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sampler = UnequalSampler(len(samples), batch, replan_steps=10, seed=seed)
        # One clock decides for all: the steps that the ranks' speeds allow in the time.
        end = int(sum(speeds) * time_s) if how == "sampler" else int(speeds[0] * time_s)
        while n_steps < end:
            for x, y in DataLoader(samples, batch_sampler=sampler):
                with sampler.forward():
                    work(rank, sampler.local_size, sample_s, 3)
                    loss = sampler.scale(torch.nn.functional.mse_loss(parallel(x), y))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sampler.step()
                n_steps += 1
                if n_steps == end:
                    break
    taken_s = time.perf_counter() - start_s
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(samples.tensors[0]), samples.tensors[1])
    return {"loss": float(loss), "time_s": taken_s, "steps": n_steps}


def mean_of(how: str, n_ranks: int, seeds: range, time_s: float) -> dict[str, float]:
    results = [run(trained, how, seed, time_s, n_ranks=n_ranks)[0] for seed in seeds]
    return {key: statistics.mean(result[key] for result in results) for key in ("loss", "time_s", "steps")}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "sampler": run(step_time, True, 120, n_ranks=N_RANKS),
                "plain": run(step_time, False, 60, n_ranks=N_RANKS),
                "ideal_s": BATCH / sum([1 / SAMPLE_S] * (N_RANKS - 1) + [0.5 / SAMPLE_S]),
                "overhead": run(overhead, n_ranks=2),
                "trained": {
                    how: mean_of(how, n_ranks, range(5), 6.0)
                    for how, n_ranks in (("sampler", 3), ("copies", 3), ("fastest alone", 1))
                },
            }
        )
    )
