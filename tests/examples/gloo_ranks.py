"""Runs under the Python that has PyTorch: ranks over gloo, new processes for each check. Prints one JSON object."""

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "unequal_gpus"))
from unequal_sampler import UnequalSampler

N_FEATURES, N_RANKS = 6, 3


def samples(n_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n_samples, N_FEATURES, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True).tanh() + torch.arange(n_samples, dtype=torch.float64)[:, None] / n_samples
    return TensorDataset(x, y)


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(N_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).double()


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient_of_one_step(rank: int) -> dict[str, Any]:
    data, model, single = samples(32), DistributedDataParallel(network()), network()
    sampler = UnequalSampler(32, 32)
    sampler.sizes = [1, 7, 24]
    for x, y in DataLoader(data, batch_sampler=sampler):
        with sampler.forward():
            loss = loss_of(model, x, y)
        sampler.scale(loss).backward()
        sampler.step()
    loss_of(single, *data.tensors).backward()
    plain = DistributedDataParallel(network())
    loss_of(plain, x, y).backward()
    return {
        "local": len(x),
        "error": float((gradients(model) - gradients(single)).abs().max()),
        "unscaled_error": float((gradients(plain) - gradients(single)).abs().max()),
    }


def two_hundred_steps(rank: int) -> dict[str, Any]:
    """Ten epochs of 20 steps whose last batch is short, planned anew every 3 steps; ranks 0 and 2 are slowed."""
    data, n_samples, batch = samples(19 * 32 + 2), 19 * 32 + 2, 32
    model, single = DistributedDataParallel(network()), network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, single)]
    sampler = UnequalSampler(n_samples, batch, replan_steps=3, max_batch=20 if rank == 1 else None)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1)
    worst, plans, seen, n_steps = 0.0, set(), [], 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        order = sampler._order()
        for step, (x, y) in enumerate(loader):
            total = min(batch, n_samples - step * batch)
            size = sampler.local_size
            with sampler.forward():
                time.sleep((0.0009, 0.0003, 0.0006)[rank] * size)
                loss = sampler.scale(loss_of(model, x, y))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            sampler.step()
            whole = [tensor[order[step * batch : step * batch + total]] for tensor in data.tensors]
            expected = loss_of(single, *whole)
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
            mean = loss.detach() / N_RANKS
            dist.all_reduce(mean)
            worst = max(worst, abs(float(mean) - float(expected)))
            plans.add(tuple(sampler.sizes))
            seen += [round(float(one) * 1e6) for one in x[:size, 0]] if epoch == 4 else []
            n_steps += 1
    everyone: list[Any] = [None] * N_RANKS
    dist.all_gather_object(everyone, seen)
    seen_once = sorted(one for part in everyone for one in part) == sorted(
        round(float(one) * 1e6) for one in data.tensors[0][:, 0]
    )
    return {"worst": worst, "plans": len(plans), "last": sampler.sizes, "seen_once": seen_once, "n_steps": n_steps}


def half_an_epoch(rank: int) -> dict[str, Any]:
    """Half of an epoch; what it saw and the state to go on from."""
    sampler = UnequalSampler(50, 8, seed=5)
    sampler.set_epoch(2)
    seen: list[int] = []
    for step, indices in enumerate(sampler):
        seen += indices[: sampler.local_size]
        sampler.step()
        if step == 2:
            break
    return {"seen": seen, "state": sampler.state_dict()}


def rest_of_the_epoch(rank: int, state: dict[str, int]) -> dict[str, Any]:
    sampler = UnequalSampler(50, 8)
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    seen: list[int] = []
    n_steps = len(sampler)
    for indices in sampler:
        seen += indices[: sampler.local_size]
        sampler.step()
        n_steps -= 1
    return {"seen": seen, "left": n_steps, "next": len(list(sampler)), "epoch": sampler.epoch}


def resumed_at_the_end(rank: int) -> dict[str, Any]:
    """The epochs and steps of a loop that goes on from a state saved after the last step of epoch 1."""
    sampler = UnequalSampler(24, 8)
    sampler.load_state_dict({"epoch": 1, "consumed": 24, "seed": 0, "n_samples": 24})
    steps = []
    for epoch in range(sampler.epoch, 4):
        sampler.set_epoch(epoch)
        count = 0
        for _ in sampler:
            assert sampler.epoch == epoch
            sampler.step()
            count += 1
        steps.append(count)
    return {"steps": steps}


def accumulation(rank: int) -> dict[str, Any]:
    """Two micro-batches of 16 with unequal sizes against one batch of 32."""
    data, model, single = samples(32), DistributedDataParallel(network()), network()
    sampler = UnequalSampler(32, 16)
    sampler.sizes = [2, 3, 11]
    for step, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
        with sampler.forward():
            loss = sampler.scale(loss_of(model, x, y)) / 2
        if step:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        sampler.step()
    loss_of(single, *data.tensors).backward()
    return {"error": float((gradients(model) - gradients(single)).abs().max())}


def refusals(rank: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        UnequalSampler(8, 8, model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        UnequalSampler(8, 8, model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    texts = []
    sampler = UnequalSampler(8, 8)

    def step_forgotten() -> None:
        for _ in UnequalSampler(8, 3, replan_steps=9):
            pass
        for _ in sampler:
            for _ in range(2):
                with sampler.forward():
                    pass

    for wrong in (
        UnequalSampler(8, 8).step,
        step_forgotten,
        lambda: UnequalSampler(8, 2),
        lambda: UnequalSampler(64, 64, max_batch=3),
        lambda: sampler.load_state_dict({"epoch": 0, "consumed": 0, "seed": 0, "n_samples": 9}),
    ):
        try:
            wrong()
            texts.append("")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return {"warned": [str(one.message) for one in warned], "texts": texts}


def _rank(rank: int, n_ranks: int, folder: str, check: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    try:
        result: Any = check(rank, *args)
    except Exception:
        result = {"failed": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def run(check: Callable[..., dict[str, Any]], *args: Any, n_ranks: int = N_RANKS) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (n_ranks, folder, check, args), nprocs=n_ranks, start_method="fork")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n_ranks)]


if __name__ == "__main__":
    checks = (
        gradient_of_one_step,
        two_hundred_steps,
        half_an_epoch,
        resumed_at_the_end,
        accumulation,
        refusals,
    )
    results = {check.__name__: run(check) for check in checks}
    state = results["half_an_epoch"][0]["state"]
    results["rest_of_the_epoch"] = run(rest_of_the_epoch, state, n_ranks=2)
    print(json.dumps(results))
