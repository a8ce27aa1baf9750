"""One run of almanac-pack: tasks start on free places, end, and run again after another task's fault."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from almanac.units import counted, format_duration
from slurm_hooks.packing.ending import ENDING, awaited, end_run
from slurm_hooks.packing.job import mark_job
from slurm_hooks.packing.mps import Mps, MpsError, MpsTimeoutError
from slurm_hooks.packing.options import Item, say
from slurm_hooks.packing.task import (
    NO_OUTPUT,
    NOT_EXECUTABLE,
    NOT_FOUND,
    Output,
    PackGpu,
    Running,
    Slot,
    command_of,
    exit_code,
    open_output,
    output_path,
    start_process,
    task_environ,
)

if TYPE_CHECKING:
    from slurm_hooks.packing.share_search import TaskSearch

LOOK_S = 1.0
MOST_WAITS = 60
SETTLE_S = 0.2

ShareOf = Callable[[Slot], int | None]
"""Percent of its GPU for the task that starts next in a slot; None: no limit. Asked before each start under MPS."""


class StartError(Exception):
    """A task cannot be started; the message says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class PackRun:
    """One run of almanac-pack: it starts tasks on the GPUs' slots, waits for them, and ends them.

    environ: of the job. mask: signals that tasks have blocked. token, folder: of this run. make_mps: the daemon to
    start for a GPU, by its place; None: time-slicing. limit_mib: memory limit of a slot, None: no limit. search: learns
    how fast tasks are under their shares.
    """

    def __init__(
        self,
        items: Sequence[Item],
        gpus: Sequence[PackGpu],
        environ: Mapping[bytes, bytes],
        *,
        token: str,
        folder: str,
        mask: set[int],
        output_pattern: str,
        grace_s: float,
        make_mps: Callable[[int], Mps | None],
        share_of: ShareOf,
        limit_mib: Callable[[Slot], int | None],
        search: TaskSearch | None = None,
    ) -> None:
        self._todo, self._gpus, self._environ = deque(items), gpus, environ
        self._text_environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
        self._appends = self._text_environ.get("SLURM_OPEN_MODE", "").startswith("a")
        self._token, self._folder, self._mask = token, folder, mask
        self._pattern, self._grace_s = output_pattern, grace_s
        self._make_mps, self._share_of, self._limit_mib = make_mps, share_of, limit_mib
        self._search = search
        self._marking, self._is_shared = mark_job(environ), False
        self._asked_for_mps: set[int] = set()
        self._daemons: list[Mps] = []
        self._codes: dict[int, int] = {}
        self._again: set[int] = set()
        self._outputs: set[str] = set()
        self._end_signal = 0
        self._end_s = 0.0
        self._awaited = awaited()
        self._waits_left = MOST_WAITS

    def run(self) -> int:
        """The worst exit code of all tasks, once nothing is left of them."""
        try:
            self._start_tasks()
            while self._is_busy():
                self._wait()
                if self._take_ended() and self._todo:
                    self._await_end_signal()
                self._run_innocent_again()
                if self._end_signal and time.monotonic() >= self._end_s:
                    break
                self._start_tasks()
        finally:
            self._end()
        return max([*self._codes.values(), 128 + self._end_signal if self._end_signal else 0], default=0)

    def _is_busy(self) -> bool:
        return any(gpu.running or (gpu.failed and not self._end_signal) for gpu in self._gpus)

    # --- starting

    def _start_tasks(self) -> None:
        """Start what can start. A task that cannot be started leaves its place to the next one."""
        while not self._end_signal and (place := self._free_place()):
            gpu, slot = place
            mps = None if gpu.alone else self._mps_of(gpu, slot.gpu)
            self._take_signals(0)  # those, too, that came while MPS did not answer
            if not self._end_signal:
                item = gpu.next_alone()
                self._start(gpu, slot, item or self._todo.popleft(), mps, is_alone=item is not None)

    def _free_place(self) -> tuple[PackGpu, Slot] | None:
        """Of the GPU with the fewest tasks; None where nothing can start now."""
        for gpu in self._gpus:
            if gpu.alone and not gpu.running:
                return gpu, gpu.slots[0]
        free = [(len(gpu.running), number) for number, gpu in enumerate(self._gpus) if gpu.free_slots()]
        if not free or not self._todo:
            return None
        gpu = self._gpus[min(free)[1]]
        return gpu, gpu.free_slots()[0]

    def _start(self, gpu: PackGpu, slot: Slot, item: Item, mps: Mps | None, *, is_alone: bool) -> None:
        try:
            output = self._open_output(item, slot, must_append=is_alone or self._appends)
            process = self._start_process(gpu, slot, item, mps, output)
        except StartError as error:
            self._codes[item.index] = error.code
            say(f"{_name(item)}: {error}; it counts as code {error.code}")
            return
        gpu.running[slot.number] = Running(item, slot, process, output, mps is not None)
        self._tell_search(lambda search: search.started(slot, item, mps is not None))
        gpu.is_alone = is_alone

    def _open_output(self, item: Item, slot: Slot, *, must_append: bool) -> Output:
        path = output_path(self._pattern, item, slot.number, self._text_environ)
        must_append |= path in self._outputs
        self._outputs.add(path)
        try:
            return open_output(path, must_append)
        except (OSError, ValueError) as error:
            raise StartError(NO_OUTPUT, f"its output {path} cannot be written: {_why(error)}") from None

    def _start_process(
        self, gpu: PackGpu, slot: Slot, item: Item, mps: Mps | None, output: Output
    ) -> subprocess.Popen[bytes]:
        variables = {b"CUDA_VISIBLE_DEVICES": gpu.name.encode()}
        if mps is not None:
            variables = mps.client_variables(self._share(slot), self._limit_mib(slot))
            self._tell_search(lambda search: variables.update(search.variables(slot, item)))
        environ = task_environ(self._environ, item, slot, variables, self._token)
        try:
            return self._process_when_possible(
                lambda: start_process(command_of(item), environ, output, slot.cpus, self._mask)
            )
        except (OSError, ValueError) as error:
            output.close()
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise StartError(code, f"{item.argv[0]} cannot be run: {_why(error)}") from None

    def _process_when_possible(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Too many processes or too little memory may last a moment only: tried again, a minute in all."""
        while True:
            try:
                return start()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM) or self._end_signal or not self._waits_left:
                    raise
                self._waits_left -= 1
                self._take_signals(LOOK_S)

    def _share(self, slot: Slot) -> int | None:
        try:
            return self._share_of(slot)
        except Exception as error:
            say(f"slot {slot.number}: no limit on its share of the GPU: {error}")
            return None

    def _tell_search(self, tell: Callable[[TaskSearch], object]) -> None:
        """Whatever goes wrong in the search, the tasks go on."""
        try:
            if self._search is not None:
                tell(self._search)
        except Exception as error:
            self._search, self._share_of = None, lambda slot: None
            say(f"the search for shares ends, and tasks have no limit from now on: {error}")

    def _mps_of(self, gpu: PackGpu, number: int) -> Mps | None:
        """The GPU's daemon, started for its first task; None: time-slicing."""
        if number not in self._asked_for_mps:
            self._asked_for_mps.add(number)
            gpu.mps = self._started_mps(number)
        elif gpu.mps is not None and not gpu.mps.is_alive():
            say(f"the MPS daemon of GPU {gpu.name} does not answer any more; the next tasks share it by time-slicing")
            gpu.mps, gpu.has_lost_mps = None, True
        return gpu.mps

    def _started_mps(self, number: int) -> Mps | None:
        mps = self._make_mps(number)
        if mps is None:
            return None
        try:
            mps.start()
        except (MpsError, OSError) as error:
            say(f"no MPS: {error}; tasks share the GPU by time-slicing")
            if isinstance(error, MpsTimeoutError):  # one wait is enough
                self._make_mps = lambda place: None
            return None
        self._daemons.append(mps)
        return mps

    # --- waiting

    def _wait(self) -> None:
        """Until a task ends, a signal comes, or a second has passed."""
        self._mark_job()
        self._take_signals(LOOK_S)
        for run in self._all_running():
            run.look()
        self._tell_search(lambda search: search.look())

    def _mark_job(self) -> None:
        """Once two tasks share a GPU, so that tasks which run one after another leave no mark."""
        self._is_shared |= any(len(gpu.running) > 1 for gpu in self._gpus)
        if self._is_shared:
            next(self._marking, None)

    def _take_signals(self, seconds: float) -> None:
        """All that have come; the first within so many seconds."""
        got = signal.sigtimedwait(self._awaited, seconds)
        while got is not None:
            if got.si_signo != signal.SIGCHLD:
                self._pass_on(got.si_signo)
            got = signal.sigtimedwait(self._awaited, 0)

    def _await_end_signal(self) -> None:
        """Slurm signals all processes of a job one by one: tasks can end before this process gets the signal."""
        until = time.monotonic() + SETTLE_S
        while not self._end_signal and (left_s := until - time.monotonic()) > 0:
            self._take_signals(left_s)

    def _pass_on(self, number: int) -> None:
        if number in ENDING and not self._end_signal:
            self._end_signal, self._end_s = number, time.monotonic() + self._grace_s
            left = f"; {counted(len(self._todo), 'task')} not started" if self._todo else ""
            say(f"signal {number}: tasks get it too, and {self._grace_s:g} s to end{left}")
        for run in self._all_running():
            run.send(number)

    def _all_running(self) -> list[Running]:
        return [run for gpu in self._gpus for run in gpu.running.values()]

    # --- ending

    def _take_ended(self) -> bool:
        """Return True if any task has ended."""
        before = len(self._all_running())
        for gpu in self._gpus:
            for number, run in list(gpu.running.items()):
                if run.process.poll() is not None:
                    del gpu.running[number]
                    self._note_end(gpu, run)
            if gpu.is_alone and not gpu.running:
                gpu.is_alone = False
        return len(self._all_running()) < before

    def _note_end(self, gpu: PackGpu, run: Running) -> None:
        code = exit_code(run.process.returncode)
        fault = run.output.fault()
        if fault and not code:
            code = NO_OUTPUT
        text = run.output.tail() if code and run.is_client else ""
        run.output.close()
        self._codes[run.item.index] = code
        self._tell_search(lambda search: search.ended(run.slot, 0 if self._end_signal else code))
        lost = f"; its output may be cut: {fault}" if fault else ""
        took = format_duration(time.monotonic() - run.began_s)
        say(f"{_name(run.item)} ended with code {code} after {took}, output in {run.output.path}{lost}")
        if code and run.is_client and not self._end_signal:
            gpu.note_failure(run, text)

    def _run_innocent_again(self) -> None:
        for gpu in self._gpus:
            found, why = gpu.innocent() if not self._end_signal else ([], "")
            for item in found:
                if item.index not in self._again:
                    self._again.add(item.index)
                    gpu.alone.append(item)
                    say(f"{_name(item)}: {why}; it runs again, alone on the GPU and without MPS")

    def _end(self) -> None:
        """Nothing of this run is left after it."""
        self._marking.close()
        self._tell_search(lambda search: search.close())
        grace_s = 0.0 if self._end_signal else self._grace_s
        for fault in end_run(
            self._token,
            self._folder,
            self._daemons,
            grace_s,
            must_signal=not self._end_signal,
            own_tasks=lambda: {run.process.pid for run in self._all_running() if run.process.poll() is None},
        ):
            say(fault)
        self._take_ended()


def _name(item: Item) -> str:
    return f"item {item.index}" if item.is_of_sweep else f"{item.argv[0]} (item {item.index})"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
