"""A batch sampler that gives slower ranks smaller batches, with the same gradient as one process.

Copy this file and batch_shares.py into the folder of your program. Needs PyTorch 1.13 or later.
"""

import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from batch_shares import next_weights, split_batch


class UnequalSampler:
    """Batches of indices for `DataLoader(batch_sampler=...)`; their sizes follow each rank's speed.

    Per step: `with sampler.forward():` around the forward pass, `sampler.scale(loss).backward()`, `sampler.step()`.
    The loss is the mean over the local batch. All ranks use the same DataLoader settings. With accumulation,
    call all three for each micro-batch, and divide the scaled loss by their number.
    A rank without a sample in a short last batch gets a padding sample, and `scale` multiplies its loss by 0.
    max_batch: this rank's memory cap in samples; None is no cap.
    """

    def __init__(
        self,
        n_samples: int,
        global_batch: int,
        *,
        replan_steps: int = 20,
        max_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        if n_samples < 1 or global_batch < self.n_ranks or replan_steps < 1:
            raise ValueError(
                f"n_samples={n_samples}, global_batch={global_batch}, replan_steps={replan_steps}: expected at least "
                f"1 sample, a global batch of at least {self.n_ranks} (one per rank), and 1 step"
            )
        self.n_samples, self.global_batch, self.replan_steps = n_samples, global_batch, replan_steps
        self.seed, self.shuffle, self.epoch, self.consumed = seed, shuffle, 0, 0
        self.caps = [None if cap is None else int(cap) for cap in _gather(max_batch)]
        self.sizes = split_batch(global_batch, [1.0] * self.n_ranks, self.caps)
        self._pending: deque[tuple[int, int]] = deque()
        self._steps, self._is_measured, self._is_restored = 0, False, False
        self._stopwatch = _Stopwatch()
        if model is not None:
            warn_of_batch_norm(model)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its first sample; the epoch that load_state_dict restored goes on after its last step."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def __len__(self) -> int:
        return -(-(self.n_samples - self.consumed) // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        self._pending.clear()
        self._is_measured = False
        if self.consumed >= self.n_samples and not self._is_restored:
            self.consumed, self.epoch = 0, self.epoch + 1
        self._is_restored = False
        order = self._order()
        start = self.consumed
        while start < self.n_samples:
            total = min(self.global_batch, self.n_samples - start)
            sizes = self.sizes if total == self.global_batch else split_batch(total, self.sizes, self.caps)
            first = start + sum(sizes[: self.rank])
            size = sizes[self.rank]
            self._pending.append((size, total))
            rows = order[first : first + size] if size else order[start : start + 1]
            yield rows.tolist()
            start += total

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.n_samples)
        return torch.randperm(self.n_samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    @property
    def _current(self) -> tuple[int, int]:
        """Samples of the current batch, on this rank and in all."""
        if not self._pending:
            raise RuntimeError("UnequalSampler: no batch; call forward(), scale(), and step() inside the loop over it")
        return self._pending[0]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure the forward pass of the current batch; RuntimeError where the batch before had no `step()`."""
        size, _ = self._current
        if self._is_measured:
            raise RuntimeError("UnequalSampler: call step() once after each batch, before the next forward()")
        self._is_measured = True
        with self._stopwatch.lap(max(size, 1)):
            yield

    @property
    def local_size(self) -> int:
        """Samples of the current batch on this rank; 0 where its one sample is padding."""
        return self._current[0]

    def scale(self, loss: Any) -> Any:
        """Return the local mean loss times b_i n / B, which makes DDP's mean over ranks the mean over samples."""
        size, total = self._current
        return loss * (size * self.n_ranks / total)

    def step(self) -> None:
        """End the current batch; every `replan_steps` batches, exchange the times and plan new sizes."""
        self.consumed += self._current[1]
        self._pending.popleft()
        self._steps, self._is_measured = self._steps + 1, False
        if self._steps % self.replan_steps == 0:
            times = _gather(self._stopwatch.sample_time_s())
            self.sizes = split_batch(self.global_batch, next_weights(self.sizes, times), self.caps)

    def state_dict(self) -> dict[str, int]:
        """Return the position in samples, which holds for any number of ranks."""
        return {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed, "n_samples": self.n_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was saved, with any number of ranks. Saved at an epoch's end, its rest has no batch."""
        if state["n_samples"] != self.n_samples:
            raise ValueError(f"the state is of {state['n_samples']} samples, the data set has {self.n_samples}")
        self.epoch, self.consumed, self.seed = state["epoch"], state["consumed"], state["seed"]
        self._is_restored = True


def warn_of_batch_norm(model: torch.nn.Module) -> None:
    """Warn where local batch statistics differ with the batch size; SyncBatchNorm sees the global batch."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    names = [
        name for name, m in model.named_modules() if isinstance(m, kind) and not isinstance(m, torch.nn.SyncBatchNorm)
    ]
    if names:
        warnings.warn(
            f"BatchNorm in {names[0] or 'the model'} sees local batches of unequal size: training is not exact; "
            "use torch.nn.SyncBatchNorm.convert_sync_batchnorm",
            stacklevel=3,
        )


class _Stopwatch:
    """Seconds per sample since the last reading. On a GPU by events, so that no step waits for the device."""

    def __init__(self) -> None:
        self._seconds, self._samples = 0.0, 0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self, n_samples: int) -> Iterator[None]:
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_s
        self._samples += n_samples

    def sample_time_s(self) -> float | None:
        if self._events:
            torch.cuda.synchronize()
            self._seconds = sum(start.elapsed_time(end) for start, end in self._events) / 1000
        mean = self._seconds / self._samples if self._samples else None
        self._seconds, self._samples, self._events = 0.0, 0, []
        return mean


def _gather(value: float | None) -> list[Any]:
    """Return every rank's value, as the backend's device asks for; None travels as NaN."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.tensor([float("nan") if value is None else float(value)], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [None if number != number else number for number in (float(tensor.item()) for tensor in everyone)]
