"""A cluster in TOML, and what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from almanac.errors import ConfigError
from simulator.cluster import Cluster, NodeGroup, PartitionSize, read_cluster

WHOLE = """
boot_s = 60
[[node_sets]]
nodes = 4
gpus = 8
gpu_model = "A100"
memory_gib = 79.5
features = ["hbm80g", "ib"]
partitions = ["a", "b"]
[[node_sets]]
nodes = 1
gpus = 2
[[partition_sizes]]
partition = "a"
day = 1
nodes = 2
[[partition_sizes]]
partition = "a"
nodes = 4
"""


def read(folder: Path, text: str, first_s: int = 0) -> Cluster:
    (folder / "cluster.toml").write_text(text)
    return read_cluster(folder / "cluster.toml")(first_s)


def test_every_key_is_read_and_day_0_starts_with_the_first_submission(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE, 1000) == Cluster(
        (
            NodeGroup(4, 8, "A100", 79.5 * 1024, frozenset({"hbm80g", "ib"}), ("a", "b")),
            NodeGroup(1, 2),
        ),
        {"a": [PartitionSize(1000, 4), PartitionSize(87_400, 2)]},
        boot_s=60,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no node set"),
        ("node_sets = 4", "must be an array of tables"),
        ("node_sets = [4]", "must be an array of tables"),
        ("[[node_set]]\nnodes = 1", "unknown key 'node_set'"),
        ("[[node_sets]]\nnodes = 1\ngpus = 8\ncpus = 1", "number 1: unknown key 'cpus'"),
        ("[[node_sets]]\nnodes = 1", "number 1: gpus is not set"),
        ("[[node_sets]]\nnodes = 0\ngpus = 8", "nodes is 0"),
        ("[[node_sets]]\nnodes = 1.5\ngpus = 8", "nodes is 1.5"),
        ("[[node_sets]]\nnodes = true\ngpus = 8", "nodes is True"),
        ("[[node_sets]]\nnodes = 1\ngpus = 65", "gpus is 65"),
        ("[[node_sets]]\nnodes = 1\ngpus = 8\nmemory_gib = nan", "memory_gib is nan"),
        ('[[node_sets]]\nnodes = 1\ngpus = 8\nfeatures = "x"', "features is 'x'"),
        ("[[node_sets]]\nnodes = 1\ngpus = 8\ngpu_model = 4", "gpu_model is 4"),
        ("[[node_sets]]\nnodes = 1\ngpus = 8\n[[partition_sizes]]\nnodes = 1", "partition is not set"),
        ("boot_s = -1\n[[node_sets]]\nnodes = 1\ngpus = 8", "boot_s is -1"),
        ('"\\u001b[2J" = 1', "unknown key '?[2J'"),
        ("nodes = [", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert said in str(error.value)
    assert error.value.hint


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster(tmp_path / "cluster.toml")
