"""How many streaming multiprocessors (SMs) a job needs to be no slower (migm-mig-scheduling, 4.3; pure).

Work that wants more SMs than a GPU has runs in waves. The last wave leaves SMs without work: these can be given away.
"""

from __future__ import annotations


def wave_count(wanted: int, sms: int) -> int:
    """Waves that work for `wanted` SMs takes on `sms` of them. Raises ValueError unless both are positive."""
    if wanted < 1 or sms < 1:
        raise ValueError(f"{wanted} SMs wanted and {sms} present: both must be at least 1")
    return -(-wanted // sms)


def least_sms(wanted: int, full: int) -> int:
    """The fewest SMs that take no more waves than a full GPU of `full` SMs: 60 for 120 wanted of 100."""
    return -(-wanted // wave_count(wanted, full))
