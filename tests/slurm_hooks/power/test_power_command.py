"""`almanac power` on the command line: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_slurm import FakeSlurm, Wanted

import cli.power
from almanac.errors import AlmanacError, BusyError, CommandError, ConfigError
from cli.app import App
from cli.power import command
from slurm_hooks.nodes.engine import NodeFolder
from slurm_hooks.power.nodes import PowerState
from telemetry.store.store import Store

CONFIG = """
[site]
cluster = "lab"
[power]
mode = "{mode}"
[[node_sets]]
name = "gpu"
nodes = "n[1-8]"
"""


class Bench:
    """The command with a store of its own and a slurmctld in memory."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.slurm = FakeSlurm([f"n{number}" for number in range(1, 9)])
        self.source = Wanted(5)
        self.mode("apply")
        Store.create(folder / "store")

    def mode(self, mode: str) -> None:
        (self.folder / "almanac.toml").write_text(CONFIG.format(mode=mode))

    def app(self) -> App:
        bench = self

        class BenchApp(App):
            @property
            def backend(self) -> Any:
                return bench.slurm

            def now_s(self) -> int:
                return int(bench.slurm.now_s)

        return BenchApp(str(self.folder / "almanac.toml"), str(self.folder / "store"))

    def __call__(self, *argv: str, code: int = 0) -> str:
        self.capsys.readouterr()
        assert (command.main(args=list(argv), standalone_mode=False, obj=self.app()) or 0) == code
        said = self.capsys.readouterr().out
        if "--json" not in argv:
            assert all(len(line) <= 80 for line in said.splitlines()), said
        return said

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self(*argv, "--json", code=code))


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, capsys)
    monkeypatch.setattr(cli.power, "source_of", lambda app, store: made.source)
    yield made


def test_a_plan_tells_slurm_nothing_and_writes_nothing(bench: Bench) -> None:
    before = sorted(bench.folder.rglob("*"))
    said = bench("plan")
    assert "gpu: 8 nodes: 0 in use, 0 wanted, 0 asleep, 8 on" in said
    assert "power down 3: n[1-3]" in said
    assert said.endswith("nothing was sent to Slurm (this is a plan)\n")
    assert bench.slurm.orders == []
    assert sorted(bench.folder.rglob("*")) == before


def test_a_plan_says_why_nodes_stay_on(bench: Bench) -> None:
    bench.slurm.put("n1", "ALLOCATED")
    bench.slurm.put("n2", "IDLE", last_busy_s=bench.slurm.now_s)
    bench.source.target = 0
    said = " ".join(bench("plan").split())
    assert "power down 6: n[3-8]" in said
    assert "2 more stay on (in use, reserved, excluded, cooling down" in said


def test_apply_acts_and_history_and_status_say_so(bench: Bench) -> None:
    with NodeFolder(bench.folder / "store/power", PowerState).lock(), pytest.raises(BusyError):
        bench("plan", "--apply")
    assert "power down 3: n[1-3]" in bench("plan", "--apply")
    bench.slurm.pass_time(600)
    assert bench.slurm.asleep() == {"n1", "n2", "n3"}
    assert "asleep: n[1-3]" in bench("status")
    assert "gpu  n[1-3]  power down: the test says so" in bench("status")
    [line] = bench.json("status")["orders"]
    assert (line["mode"], line["actuator"], line["cluster"]) == ("apply", "names", "lab")


def test_observe_logs_what_it_would_do_and_off_does_nothing(bench: Bench) -> None:
    bench.mode("observe")
    assert 'nothing was sent to Slurm (power.mode is "observe")' in bench("plan", "--apply")
    assert bench.slurm.orders == []
    assert "would power down" in bench("status")
    assert len(bench.source.noted) == 1
    assert not (bench.folder / "store/power/state.json").exists()
    bench.mode("off")
    assert bench("plan", "--apply") == ""
    assert len(bench.source.noted) == 1


def test_a_hold_is_set_shown_and_taken_off(bench: Bench) -> None:
    assert "no node powers down" in bench("hold", "--why", "fire drill \x1b[31m")
    assert bench.json("plan", "--apply")["node_sets"][0]["power_down"] == []
    assert "fire drill" in bench("status")
    assert "\x1b" not in bench("status")
    assert bench("hold", "--off") == "hold ended\n"
    assert bench("hold", "--off") == "there was no hold\n"
    assert len(bench.json("plan", "--apply")["node_sets"][0]["power_down"]) == 3


def test_orders_that_slurm_refuses_end_with_5(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.slurm, "set_node_state", lambda *_: ["slurm_update error: Invalid user id"])
    [done] = bench.json("plan", "--apply", code=5)["node_sets"]
    assert done["said"] == ["slurm_update error: Invalid user id"]
    assert done["unheard"] == ["n1", "n2", "n3"]


def test_wake_all_works_with_a_broken_configuration_store_and_lock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.power, "_backend", lambda app, config: bench.slurm)
    bench("plan", "--apply")
    bench.slurm.pass_time(600)
    for name in ("store/store.json", "store/power/state.json", "almanac.toml"):
        (bench.folder / name).write_text("broken")
    (bench.folder / "store/power/lock").unlink()
    (bench.folder / "store/power/lock").symlink_to("/nowhere")
    bench.slurm.put("n1", "DOWN", "POWERED_DOWN", "DRAIN", "NOT_RESPONDING", reason="almanac: did not wake ...")
    bench.slurm.put("n7", "IDLE", "DRAIN", reason="disk")
    said = bench("wake", "ALL")
    assert "powering up 3 nodes: n[1-3]" in said, "marked in Slurm, whatever the configuration says"
    assert "quarantine ended: n1" in said
    assert "hold: no node powers down" in said
    bench.slurm.pass_time(600)
    assert bench.slurm.asleep() == set()
    assert bench.slurm.states("n7") == {"IDLE", "DRAIN"}


def test_wake_takes_a_node_set_or_a_host_list_and_leaves_others_nodes_alone(bench: Bench) -> None:
    bench("plan", "--apply")
    bench.slurm.pass_time(600)
    bench.slurm.put("n7", "IDLE", "DRAIN", "POWERED_DOWN", reason="disk")
    done = bench.json("wake", "n[1,7],n99")
    assert (done["woken"], done["left"]) == (["n1"], ["n7", "n99"])
    assert set(bench.json("wake", "gpu")["woken"]) == {"n2", "n3"}
    for wrong in ("n[1", "@all", "$(reboot)"):
        with pytest.raises(AlmanacError):
            bench("wake", wrong)


def test_without_node_sets_it_says_what_to_do(bench: Bench) -> None:
    (bench.folder / "almanac.toml").write_text('[site]\ncluster = "lab"\n')
    for words in ("plan", "plan --apply", "status"):
        with pytest.raises(ConfigError, match="node_sets"):
            bench(*words.split())


def test_without_a_model_it_holds_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    said = bench("plan", "--apply")
    assert "no change: no model is trained for node set gpu (`almanac doctor` says why)" in " ".join(said.split())
    assert bench.slurm.orders == []


def test_the_orders_are_shown_while_slurm_is_down(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench("plan", "--apply")
    monkeypatch.setattr(bench.slurm, "nodes", mock.Mock(side_effect=CommandError("slurmctld does not answer")))
    for words, said in ((["status"], "power down: the test says so"), (["status", "--json"], '"orders": [')):
        with pytest.raises(CommandError):
            bench(*words)
        assert said in bench.capsys.readouterr().out
