"""Training on GPUs of unequal speed. Needs PyTorch: the extra `slurm-almanac[torch]`."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "almanac.train needs PyTorch, which this Python cannot import; "
        "try: pip install 'slurm-almanac[torch]', or apt-get install python3-torch"
    ) from error

from almanac.train.sampler import UnequalSampler

__all__ = ["UnequalSampler"]
