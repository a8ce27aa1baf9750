"""The search in a run of almanac-pack: tasks whose speed depends on their shares, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pack_job import PackJob

from slurm_hooks.packing.options import Item
from slurm_hooks.packing.search_file import SearchFile
from slurm_hooks.packing.share_search import SearchGoal, TaskSearch
from slurm_hooks.packing.task import Slot

Speed = Callable[[dict[int, int], int], float]


class Bench:
    """Two places on each GPU, tasks of `steps` steps, and time that passes in seconds."""

    def __init__(
        self, folder: Path, speed: Speed, *, objective: str = "jct", items: int = 100, name: str = "1"
    ) -> None:
        self.folder, self.speed, self.now_s = folder, speed, 1000.0
        self.file = SearchFile(folder / "state" / "search.json", 2, lambda: self.now_s)
        self.search = TaskSearch(
            SearchGoal(objective, 2, 5000.0), name, items, self.path_of, self.file, lambda: self.now_s,
            lambda: self.now_s,
        )  # type: ignore[arg-type]  # fmt: skip
        self.shares: dict[int, int] = {}
        self.steps: dict[int, float] = {}
        self.item = 0

    def path_of(self, slot: Slot, item: Item) -> str:
        return str(self.folder / f"progress-{slot.number}")

    def start(self, position: int) -> int:
        slot, item = Slot(position, 0, position, frozenset(), 1), Item(self.item, ("x",), True)
        self.item += 1
        self.shares[position] = self.search.share_of(slot)
        self.steps[position] = 0.0
        self.write(position)
        self.search.started(slot, item, True)
        return self.shares[position]

    def write(self, position: int, text: str = "") -> None:
        (self.folder / f"progress-{position}").write_text(text or f"step {self.steps[position]:.6f}\n")

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            for position in self.shares:
                self.steps[position] += self.speed(self.shares, position)
                self.write(position)
            self.search.look()

    def end(self, position: int, code: int = 0) -> None:
        self.search.ended(Slot(position, 0, position, frozenset(), 1), code)
        self.shares.pop(position)

    def run_pair(self, seconds: int = 30) -> tuple[int, ...]:
        shares = tuple(self.start(position) for position in range(2))
        self.pass_time(seconds)
        for position in range(2):
            self.end(position)
        return shares


def peaked(shares: dict[int, int], position: int) -> float:
    """Both fastest at shares 70 and 40."""
    return 10 - abs(shares.get(0, 100) - 70) / 20 - abs(shares.get(1, 100) - 40) / 30


def test_a_sweep_finds_the_best_shares_and_keeps_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path, peaked)
    tried = [bench.run_pair() for _ in range(16)]
    assert tried[0] == (100, 100)
    assert tried[-3:] == [(70, 40)] * 3
    said = capfd.readouterr().err
    assert "shares 100%+100%: 6.5/s, 6.5/s (try 1 of at most 13); best so far 100%+100%" in said
    assert "; the search is done, the next tasks get 70%+40%" in said


def test_the_next_job_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    tried = [Bench(tmp_path, peaked, name=str(number)).run_pair() for number in range(16)]
    assert tried[-3:] == [(70, 40)] * 3
    assert len(set(tried)) <= 13


def test_array_tasks_at_the_same_time_try_different_shares(tmp_path: Path) -> None:
    for number in range(3):
        Bench(tmp_path, peaked, name=str(number)).run_pair()
    at_once = [Bench(tmp_path, peaked, name=f"at-once-{number}") for number in range(4)]
    tried = [tuple(bench.start(position) for position in range(2)) for bench in at_once]
    assert len(set(tried)) == 4
    at_once[0].search.close()
    assert len(at_once[0].file.read().claims) == 3


def test_a_task_that_goes_on_keeps_its_share(tmp_path: Path) -> None:
    bench = Bench(tmp_path, peaked)
    assert [bench.start(0), bench.start(1)] == [100, 100]
    seen = []
    for _ in range(8):
        bench.pass_time(30)
        bench.end(1)
        seen.append(bench.start(1))
        assert bench.shares[0] == 100
    assert 40 in seen  # the best share beside 100


def test_long_tasks_are_recorded_after_a_minute(tmp_path: Path) -> None:
    bench = Bench(tmp_path, peaked)
    bench.start(0), bench.start(1)
    bench.pass_time(58)
    assert bench.file.read().tries == ()
    bench.pass_time(300)
    (one,) = bench.file.read().tries
    assert one.shares == (100, 100)
    assert one.steps_per_s == pytest.approx((6.5, 6.5))
    assert one.runs == 1
    assert bench.file.read().claims == {}


def test_time_beside_another_neighbor_does_not_count(tmp_path: Path) -> None:
    """The first task runs four times as fast before the second one starts."""
    bench = Bench(tmp_path, lambda shares, position: 8.0 if len(shares) == 1 else 2.0)
    bench.start(0)
    bench.pass_time(100)
    bench.start(1)
    bench.pass_time(30)
    bench.end(1)
    assert bench.file.read().tries[0].steps_per_s == (2.0, 2.0)


def test_the_last_task_alone_gets_the_whole_gpu(tmp_path: Path) -> None:
    Bench(tmp_path, peaked).run_pair()
    bench = Bench(tmp_path, peaked, items=3, name="2")
    assert bench.run_pair() != (100, 100)
    assert bench.start(0) == 100


def test_without_progress_nothing_is_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path, lambda shares, position: 0.0)
    bench.write = lambda position, text="": None  # type: ignore[method-assign]
    for _ in range(5):
        assert bench.run_pair(200) == (100, 100)
    assert bench.file.read().tries == ()
    assert capfd.readouterr().err.count("no progress in ") == 1


@pytest.mark.parametrize("text", ["garbage", "-5", "nan", "\x1b]0;x\x07", "9" * 500])
def test_progress_that_makes_no_sense_is_no_standstill(tmp_path: Path, text: str) -> None:
    bench = Bench(tmp_path, peaked)
    original = bench.write
    bench.write = lambda position, _="": original(position, text)  # type: ignore[method-assign]
    assert [bench.run_pair() for _ in range(3)] == [(100, 100)] * 3


def test_a_task_that_fails_early_is_tried_again_and_three_end_the_search(tmp_path: Path) -> None:
    bench = Bench(tmp_path, peaked)
    bench.run_pair()
    tried = []
    for _ in range(3):
        tried.append(tuple(bench.start(position) for position in range(2)))
        bench.pass_time(1)
        bench.end(1, code=1)
        bench.end(0)
    assert len(set(tried)) == 1 and tried[0] != (100, 100)
    assert [bench.run_pair() for _ in range(2)] == [(100, 100)] * 2


def test_a_task_that_fails_at_its_end_was_measured(tmp_path: Path) -> None:
    """Both fail one after the other: the second one next to a task that has just started."""
    bench = Bench(tmp_path, peaked)
    bench.start(0), bench.start(1)
    bench.pass_time(30)
    bench.end(0, code=3)
    bench.start(0)
    bench.pass_time(1)
    bench.end(1, code=3)
    assert [one.is_measured for one in bench.file.read().tries] == [True]


def test_a_deadline_that_is_met_leaves_free_competition(tmp_path: Path) -> None:
    """100 steps are left of each at 6.5 steps per second."""
    bench = Bench(tmp_path, peaked, objective="deadline")
    original = bench.write
    bench.write = lambda position, _="": original(position, f"step {bench.steps[position]:.0f}/300")  # type: ignore[method-assign]
    assert [bench.run_pair() for _ in range(3)] == [(100, 100)] * 3


def test_a_file_that_cannot_be_used_ends_with_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").write_text("no folder")
    bench = Bench(tmp_path, peaked)
    tried = [bench.run_pair() for _ in range(16)]
    assert tried[-1] == (70, 40)
    assert capfd.readouterr().err.count("the search ends with this run") == 1


def test_only_shares_that_are_tried_are_claimed(tmp_path: Path) -> None:
    """1,000 array tasks with the best shares must not crowd out the claims of those that try others."""
    for number in range(16):
        Bench(tmp_path, peaked, name=str(number)).run_pair()
    bench = Bench(tmp_path, peaked, name="late")
    assert (bench.start(0), bench.start(1)) == (70, 40)
    assert bench.file.read().claims == {}


def test_a_broken_file_is_said_once_and_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path, peaked)
    bench.file.path.parent.mkdir()
    bench.file.path.write_text("{")
    bench.run_pair()
    assert len(bench.file.read().tries) == 1
    assert capfd.readouterr().err.count("is not understood") == 1


# --- as a process

PROGRAM = """
speed=$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE step=0
for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17; do
    step=$((step + speed)); echo "step $step" >"$ALMANAC_PACK_PROGRESS.new"
    mv "$ALMANAC_PACK_PROGRESS.new" "$ALMANAC_PACK_PROGRESS"; sleep 0.2
done
echo "$speed"
"""


def test_speed_follows_the_share_of_a_real_process(job: PackJob) -> None:
    """By makespan, with a speed that is the share: free competition is best, and half is tried, too."""
    job.install_mps()
    code, said = job.run("--search=makespan", "--items=0-3", "--", "sh", "-c", PROGRAM, SLURM_JOB_NAME="sweep-1")
    assert code == 0, said
    assert [int(job.output(item)) for item in range(4)].count(100) >= 3
    assert "search for shares (makespan): " in said
    assert "shares 100%+100%: " in said
    (state,) = (job.root / ".local/state/almanac/pack").glob("*.json")
    assert state.name.startswith("sweep-")
    job.wait_until_nothing_is_left()
    found = SearchFile(state, 2).read()
    assert found.claims == {}
    assert found.tries[0].shares == (100, 100)
    assert [rate for rate in found.tries[0].steps_per_s if rate and 100 < rate < 700]
    code, said = job.run(
        "--search=makespan", "--items=0-1", "--progress=steps.%a", "--", "sh", "-c", PROGRAM, SLURM_JOB_NAME="sweep-2"
    )
    assert code == 0, said
    assert (job.root / "steps.1").exists()
    assert len(list((job.root / ".local/state/almanac/pack").glob("*.json"))) == 1
    assert len({*map(int, (job.output(0), job.output(1)))} | {100}) > 1


def test_without_mps_there_is_no_search(job: PackJob) -> None:
    code, said = job.run("--search=jct", "--items=0-1", "--", "sh", "-c", "echo ${ALMANAC_PACK_PROGRESS-none}")
    assert code == 0
    assert "no search for shares: they need MPS" in said
    assert job.output(0) == "none\n"
    assert not (job.root / ".local").exists()


def test_the_time_limit_is_the_deadline(job: PackJob) -> None:
    job.install_mps()
    argv = ("--search=deadline", "--items=0-1", "--", "true")
    code, said = job.run(*argv)
    assert code == 2
    assert "--search deadline needs --deadline TIME" in said
    assert job.run("--deadline=2126-01-01T00:00", *argv)[0] == 0
    assert job.run(*argv, SLURM_JOB_END_TIME="4922000000")[0] == 0
