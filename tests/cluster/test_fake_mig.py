"""The fake nvidia-smi and nvidia-mig-parted: what a driver allows, what it refuses, and each planned fault."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_mig import FAULTS, main
from fake_mig_gpus import MODELS, DriverError, Node, instance_id, locked, new_state

from almanac.mig import mig_models

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
        """What the command prints, stderr last."""
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


@pytest.mark.parametrize("model", MODELS)
def test_no_random_sequence_leads_to_an_illegal_layout(model: str) -> None:
    rng = random.Random(model)
    walked = Node(Path("/dev/null"), new_state(model, 1, "n1"))
    walked.save = lambda: None  # type: ignore[method-assign]
    walked.gpus[0]["mig"] = True
    most = mig_models()[ALMANACS[model]].compute_slices
    for _ in range(2000):
        instances = walked.gpus[0]["instances"]
        if instances and rng.random() < 0.4:
            walked.destroy(0, rng.choice(instances)["gi"])
        else:
            with suppress(DriverError):
                walked.create(0, rng.choice(list(MODELS[model].profiles)))
        rows = [(MODELS[model].profiles[one["profile"]], one["start"]) for one in walked.gpus[0]["instances"]]
        slots = [slot for row, start in rows for slot in range(start, start + row.size)]
        assert len(slots) == len(set(slots)) and sum(row.compute for row, _ in rows) <= most
        assert sum("+me" in row.name for row, _ in rows) <= 1


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


def test_a_config_must_name_every_gpu_and_nothing_strange(node: FakeNode) -> None:
    node.parted("apply", ONES, {**WHOLE, "devices": [1]})
    assert node.shown == {"0": {"1g.5gb": 7}, "1": None}
    node.parted("assert", ONES, status=1)
    assert "unexpected field" in node.parted("apply", {**ONES, "placement": [0]}, status=1)
    assert "unexpected field" in node.parted("apply", ONES, status=1, hooks={})
    assert "missing required field" in node.parted("apply", {"devices": [0], "mig-enabled": True}, status=1)
    assert "when 'mig-enabled' is false" in node.parted("apply", {**ONES, "mig-enabled": False}, status=1)
    assert node.shown == {"0": {"1g.5gb": 7}, "1": None}


@pytest.mark.parametrize("devices", [{"1g.5gb": 8}, {"4g.20gb": 2}, {"7g.40gb": 1, "1g.5gb": 1}, {"9g.50gb": 1}])
def test_what_fits_on_no_gpu_is_refused_and_leaves_it_empty(node: FakeNode, devices: dict[str, int]) -> None:
    node.parted("apply", ONES, MIXED)
    assert "all orderings failed" in node.parted("apply", {**ONES, "mig-devices": devices}, MIXED, status=1)
    assert node.shown["0"] == {}


def test_an_unchanged_gpu_keeps_its_busy_instances_and_a_changed_one_refuses(node: FakeNode) -> None:
    node.parted("apply", ONES, MIXED)
    node("busy", "1", "2", "4242")
    node.parted("apply", {**ONES, "mig-devices": {"2g.10gb": 3}}, MIXED)
    assert "In use by another client" in node.parted("apply", ONES, {**MIXED, "mig-devices": {"7g.40gb": 1}}, status=1)
    assert node.shown["1"]["3g.20gb"] == 1
    assert node("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader") == "4242, 1024 MiB\n"
    node("idle")
    node.parted("apply", ONES, {**MIXED, "mig-devices": {"7g.40gb": 1}})


def test_instance_ids_and_uuids_come_back_with_another_profile(node: FakeNode) -> None:
    seen = []
    for devices in ({"2g.10gb": 3}, {"1g.10gb": 4}):
        node.parted("apply", {**ONES, "devices": "all", "mig-devices": devices})
        with locked(node.state) as gpus:
            seen.append({one["gi"]: (one["profile"], one["uuid"]) for one in gpus.gpus[0]["instances"]})
    before, after = seen
    assert (before[5][0], after[5][0], before[5][1]) == ("2g.10gb", "1g.10gb", after[5][1])


def test_a_change_of_mode_waits_for_a_reset_and_can_be_refused_it(node: FakeNode) -> None:
    node("fail", "reset-refused")
    assert "could not be reset" in node.parted("apply", ONES, MIXED, status=1)
    assert node.shown == {"0": None, "1": None}
    query = ("nvidia-smi", "--query-gpu=mig.mode.current,mig.mode.pending", "--format=csv,noheader")
    assert node(*query).splitlines() == ["Disabled, Enabled"] * 2
    node.parted("apply", ONES, MIXED)
    node("busy", "0", "-1", "7")
    assert "resetting all GPUs" in node.parted("apply", WHOLE, status=1)
    node("idle")
    node.parted("apply", WHOLE)
    assert node("gres") == "gpu:a100:2\n"


def test_each_fault_does_what_its_name_says(node: FakeNode) -> None:
    node.parted("apply", ONES, {**ONES, "devices": [1]})
    twos = [{**ONES, "devices": [0, 1], "mig-devices": {"2g.10gb": 3}}]
    node("fail", "in-use", "--gpu", "0")
    assert "In use by another client" in node.parted("apply", *twos, status=1)
    assert node.shown["1"] == {"1g.5gb": 7}
    node("fail", "half-applied")
    node.parted("apply", *twos, status=1)
    assert node.shown == {"0": {"2g.10gb": 3}, "1": {}}
    node("fail", "wrong")
    node.parted("apply", *twos)
    node.parted("assert", *twos, status=1)
    node("fail", "driver", "--times", "2")
    assert "couldn't communicate" in node("nvidia-smi", "-L", status=9)
    assert "Driver Not Loaded" in node.parted("assert", *twos, status=1)
    node.parted("apply", *twos)
    assert [call[:2] for call in map(json.loads, node("calls").splitlines())][-1] == ["nvidia-mig-parted", "apply"]


def test_a_killed_apply_leaves_what_it_had_made_and_a_hanging_one_takes_its_time(
    node: FakeNode, tmp_path: Path
) -> None:
    node("fail", "killed")
    node("install", str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"version": "v1", "mig-configs": {"wanted": [{**ONES, "devices": "all"}]}}))
    argv = [tmp_path / "nvidia-mig-parted", "apply", "-f", config]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert node.shown == {"0": {"1g.5gb": 1}, "1": {}}
    node("fail", "hangs")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(argv, check=False, timeout=0.5)
    assert node.shown == {"0": {"1g.5gb": 1}, "1": {}}
    assert subprocess.run(argv, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "argv",
    [
        ("nvidia-smi",),
        ("nvidia-smi", "-r"),
        ("nvidia-smi", "--query-gpu=index,shoe_size", "--format=csv"),
        ("nvidia-smi", "--query-gpu=index", "--format=json"),
        ("nvidia-mig-parted", "restore"),
        ("nvidia-mig-parted", "apply", "--force"),
        ("fail", "softly"),
        ("dance",),
    ],
)
def test_what_it_does_not_know_ends_with_status_99(node: FakeNode, argv: tuple[str, ...]) -> None:
    assert "unknown call" in node(*argv, status=99)


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


def test_the_docstring_names_every_fault_and_model() -> None:
    text = PROGRAM.read_text()
    assert all(f"fail {fault} " in text for fault in FAULTS)
    assert sys.version_info >= (3, 11)
