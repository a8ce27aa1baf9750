"""Which GPU types nodes offer now, from sinfo's own text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from almanac.errors import CommandError
from almanac.submit_config import Tier
from telemetry.slurm.gpu_types import PartitionGpus, partition_gpus, tiers_now

SINFO = """\
all*|idle|gpu:a100:3,gpu:1g.10gb:7(S:0-1)
all*|drain|gpu:2g.20gb:3
all*|mix-|gpu:a100:4
down|down*|gpu:3g.40gb:2
cloud|idle~|gpu:4g.40gb:1
cpu|idle|(null)
odd|idle|gpu:2,nvme:1,gpu:1g.5gb:0
broken
"""
SLICE, GONE, WHOLE = (
    Tier(name="slice", capacity_mib=9728, gres="1g.10gb"),
    Tier(name="gone", capacity_mib=19968, gres="2g.20gb"),
    Tier(name="whole", capacity_mib=81920, gres="a100"),
)


def says(text: str) -> object:
    def commands(argv: Sequence[str]) -> bytes:
        assert argv[0] == "sinfo"
        return text.encode()

    return commands


def test_types_by_partition_and_state() -> None:
    assert partition_gpus(says(SINFO)) == [  # type: ignore[arg-type]
        PartitionGpus("all", True, ("a100", "1g.10gb")),
        PartitionGpus("all", False, ("2g.20gb",)),
        PartitionGpus("all", True, ("a100",)),
        PartitionGpus("down", False, ("3g.40gb",)),
        PartitionGpus("cloud", True, ("4g.40gb",)),
        PartitionGpus("odd", True, ("",)),
    ]


def test_a_type_on_no_node_in_service_is_not_advised() -> None:
    now = tiers_now((SLICE, GONE, WHOLE), says(SINFO))  # type: ignore[arg-type]
    assert (now.tiers, now.missing) == ((SLICE, WHOLE), (GONE,))
    nothing = tiers_now((SLICE, GONE, WHOLE), says(""))  # type: ignore[arg-type]
    assert nothing.tiers == ()


def test_where_slurm_does_not_answer_no_slice_is_advised() -> None:
    def fails(argv: Sequence[str]) -> bytes:
        raise CommandError("sinfo: lost", "start it")

    now = tiers_now((SLICE, WHOLE), fails)
    assert (now.tiers, now.missing) == ((WHOLE,), (SLICE,))
    assert "sinfo" in now.why_not


def test_without_slices_slurm_is_not_asked() -> None:
    def never(argv: Sequence[str]) -> bytes:
        pytest.fail("asked")

    assert tiers_now((WHOLE,), never).tiers == (WHOLE,)
    mig_partition = Tier(name="mig", capacity_mib=9728, partition="mig", compute_slices=1)
    assert tiers_now((mig_partition,), says("")).tiers == (mig_partition,)  # type: ignore[arg-type]
