"""The fake nvidia-smi and nvidia-mig-parted: what a driver allows, what it refuses, and each planned fault."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_mig import main
from fake_mig_gpus import MODELS, DriverError, Node, instance_id, locked, new_state

from almanac.hardware import mig_models

PROGRAM = Path(__file__).with_name("fake_mig.py")
ALMANACS = {"a100-40": "A100-40", "a100-80": "A100-80", "h100-80": "H100-80", "a30-24": "A30"}
ONES: dict[str, Any] = {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}
MIXED: dict[str, Any] = {"devices": [1], "mig-enabled": True, "mig-devices": {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}}
WHOLE: dict[str, Any] = {"devices": [0, 1], "mig-enabled": False}


class FakeNode:
    """A node of two A100-40 whose commands run in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state, self._capsys, self._config = folder / "state.json", capsys, folder / "config.json"
        self.gres_conf = folder / "gres.conf"
        self("init", "--model=a100-40", "--gpus=2", "--node=n1", f"--devices={folder / 'dev'}")

    def __call__(self, *argv: str, status: int = 0) -> str:
        """Return the command's output, stderr last."""
        self._capsys.readouterr()
        assert main([str(self.state), *argv]) == status
        done = self._capsys.readouterr()
        return done.out + done.err

    def parted(self, verb: str, *entries: dict[str, Any], status: int = 0, **more: Any) -> str:
        self._config.write_text(json.dumps({"version": "v1", "mig-configs": {"wanted": entries}, **more}))
        return self("nvidia-mig-parted", verb, "-f", str(self._config), "-c", "wanted", status=status)

    @property
    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("show"))
        return found


@pytest.fixture
def node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> FakeNode:
    return FakeNode(tmp_path, capsys)


@pytest.mark.parametrize("model", MODELS)
def test_the_fakes_own_table_and_almanacs_agree(model: str) -> None:
    ours = {row.name: row for row in mig_models()[ALMANACS[model]].profiles}
    fakes = MODELS[model].profiles
    assert set(fakes) == set(ours)
    for name, row in fakes.items():
        known = ours[name]
        shape = (row.compute, row.size, tuple(sorted(row.starts)), row.most, row.sms)
        assert shape == (known.compute, known.memory, known.starts, known.most, known.sms), name
        assert known.memory_gib is not None
        assert known.memory_gib[0] <= round(row.mib / 1024, 2) <= known.memory_gib[1], name


def test_a_gpu_fills_up_in_the_order_of_nvidias_transcripts() -> None:
    filled = Node(Path("/dev/null"), new_state("a100-40", 1, "n1"))
    filled.save = lambda: None  # type: ignore[method-assign]
    filled.gpus[0]["mig"] = True
    ids = []
    for _ in range(7):
        filled.create(0, "1g.5gb")
        ids.append(next(one["gi"] for one in filled.gpus[0]["instances"] if one["gi"] not in ids))
    assert ids == [13, 11, 12, 7, 8, 9, 10]
    with pytest.raises(DriverError, match="Insufficient Resources"):
        filled.create(0, "1g.5gb")
    assert [instance_id(8, size, start) for size, start in ((8, 0), (4, 0), (4, 4), (2, 0), (2, 4))] == [0, 1, 2, 3, 5]
    assert [instance_id(4, size, start) for size, start in ((4, 0), (2, 0), (2, 2), (1, 0), (1, 3))] == [0, 1, 2, 3, 6]


def test_apply_makes_the_layout_and_assert_and_every_listing_show_it(node: FakeNode) -> None:
    assert "not currently applied" in node.parted("assert", ONES, MIXED, status=1)
    assert "applied successfully" in node.parted("apply", ONES, MIXED)
    assert "currently applied" in node.parted("assert", ONES, MIXED)
    assert node.shown == {"0": {"1g.5gb": 7}, "1": {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}}
    assert node("nvidia-smi", "-L").count("MIG 1g.5gb") == 9
    assert "|   1  MIG 3g.20gb         9        2           4:4     |" in node("nvidia-smi", "mig", "-lgi")
    assert "GPU  0 Profile ID 14 Placements: {0,2,4}:2\n" in node("nvidia-smi", "mig", "-lgipp")
    assert "GPU  1 Profile ID  0 Placement : {0}:8\n" in node("nvidia-smi", "mig", "-lgipp")
    assert (
        node("nvidia-smi", "--query-gpu=index,mig.mode.current", "--format=csv,noheader") == "0, Enabled\n1, Enabled\n"
    )
    current = json.loads(node("nvidia-mig-parted", "export", "-o", "json"))["mig-configs"]["current"]
    assert current == [ONES, MIXED]
    assert node("gres") == "gpu:1g.5gb:9,gpu:2g.10gb:1,gpu:3g.20gb:1\n"


def test_the_map_of_the_shipped_prolog_reads_the_fakes_listings(node: FakeNode, tmp_path: Path) -> None:
    node.parted("apply", ONES, MIXED)
    node("install", str(tmp_path))
    with locked(node.state) as gpus:
        wanted = {
            (one["uuid"], gpu["uuid"], str(one["gi"]), str(index))
            for index, gpu in enumerate(gpus.gpus)
            for one in gpu["instances"]
        }
    device = next(iter(wanted))[0]
    prolog = PROGRAM.parents[2] / "slurm_hooks/prolog/almanac-gpus.sh"
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0", "SLURMD_NODENAME": "n1", "CUDA_VISIBLE_DEVICES": device,
        "ALMANAC_PROLOG_DIR": str(tmp_path / "records"), "ALMANAC_MIG_MAP": str(tmp_path / "run/mig"),
        "ALMANAC_NVIDIA_SMI": str(tmp_path / "nvidia-smi"),
    }  # fmt: skip
    subprocess.run(["sh", prolog, "map", "1"], env=env, check=True)
    rows = (tmp_path / "run/mig").read_text().splitlines()
    assert {tuple(row.split()) for row in rows} == wanted


def test_gres_conf_follows_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Needs root, for the device nodes that slurmd wants to see."""
    state = new_state("a100-40", 2, "n1", str(tmp_path / "gres.conf"), str(tmp_path / "dev"), "nvidia_a100-sxm4-40gb_")
    try:
        Node(tmp_path / "state.json", state).save()
    except PermissionError:
        pytest.skip("mknod needs root")
    node = FakeNode.__new__(FakeNode)
    node.state, node._capsys, node._config = tmp_path / "state.json", capsys, tmp_path / "config.json"
    node.parted("apply", {**ONES, "mig-devices": {"3g.20gb": 2}}, {**WHOLE, "devices": [1]})
    lines = (tmp_path / "gres.conf").read_text().splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["NodeName=n1", "Name=gpu", "Type=nvidia_a100-sxm4-40gb"],
        *[["NodeName=n1", "Name=gpu", "Type=nvidia_a100-sxm4-40gb_3g.20gb"]] * 2,
    ]
    assert all(Path(line.partition("File=")[2]).is_char_device() for line in lines)
    assert len(set(lines)) == 3
