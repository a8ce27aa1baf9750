"""Note a PyTorch program's memory per iteration for almanac-restart. Copy this file next to your program.

    from torch_memory import note_iteration
    for step in range(steps):
        ...
        note_iteration(step + 1, steps)

It writes to the file that ALMANAC_MEMORY_FILE names, which almanac-restart --memory-file sets; without it, it does
nothing. torch is imported at the first call.
"""

from __future__ import annotations

import os

_MIB = 1024.0 * 1024.0
_requested_before = 0.0


def note_iteration(iteration: int, last: int | None = None) -> None:
    """Append the iteration's line. Never raises: a fault here must not end a training run."""
    global _requested_before
    path = os.environ.get("ALMANAC_MEMORY_FILE")
    if not path:
        return
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]

        stats = torch.cuda.memory_stats()
        total = float(stats["requested_bytes.all.allocated"])
        held = float(stats["allocated_bytes.all.peak"])
        requested, _requested_before = total - _requested_before, total
        torch.cuda.reset_peak_memory_stats()
        with open(path, "a", encoding="ascii") as file:  # noqa: PTH123 - this file is copied elsewhere
            file.write(f"{iteration}\t{last or '-'}\t{requested / _MIB:.3f}\t{held / _MIB:.3f}\n")
    except Exception:  # whatever torch or the disk says, the training goes on
        return
