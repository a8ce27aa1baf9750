"""job_submit.lua and cli_filter.lua as wholes, without a Slurm: what they do with what Slurm hands over."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from advice_lines import shown
from lua_runner import Lua, literal, prompt_program

from advisor.types.decide import TypeRunTime, TypeWait
from almanac.submit_config import GpuType
from slurm_hooks.advice.kinds import TIMES, WAITS, WaitsFile, times_file

NOW_S = int(time.time())
TEXT = 'your last 14 runs of "train-bert-#" peaked at 21.3 GiB per GPU.'
ADVICE = "\n".join(
    [
        "almanac-advice\t1", "version\tv", f"written\t{NOW_S}", f"expires\t{NOW_S + 36_000}", "mode\tapply",
        "tell\tyes", "prompt\task", "priority\t1000\t60\t8640000", "tier\thbm40g\t40960\tconstraint\thbm40g",
        "tier\thbm80g\t81920\tconstraint\thbm80g",
        f"F\ttrain-bert-#\t2\t60\t5\t25395\thbm40g\thbm80g=40 min\t{TEXT}",
        "U\t-\t-\t600\t7\t-\t-\t-\t-", "end\t2", "",
    ]
)  # fmt: skip
GPU_JOB = {"type": "sbatch", "wrap": "sleep 1", "job-name": "train-bert-7", "gpus": "2", "constraint": "gpu&hbm80g"}


@pytest.fixture
def advice(tmp_path: Path) -> Path:
    """The root of the advice files, with one for us."""
    for name, content in (
        (f"sched/{os.getuid()}", ADVICE.encode()),
        (f"user/{os.getuid()}/advice.json", shown(ADVICE)),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(("name", "site_factor"), [("train-bert-7", 5), ("other", 7 + 8882)])
def test_a_submission_gets_its_site_factor_a_line_in_the_log_and_a_word(
    lua: Lua, advice: Path, name: str, site_factor: int
) -> None:
    """1000 ln(8640000 / (600 * 2)) is 8882."""
    job = {"name": name, "user_id": os.getuid(), "tres_per_job": "gres:gpu:2", "features": "gpu&hbm80g"}
    code = f"""
    local logged, said = "", ""
    slurm = {{
      log_info = function(...) logged = string.format(...) end,
      log_user = function(...) said = string.format(...) end,
    }}
    local job = {literal(job)}
    dofile(dir .. "job_submit.lua").submit(job, {os.getuid()}, {{ advice = {literal(str(advice))} }})
    all(job.site_factor, logged, said)
    """
    ((factor, logged, said),) = lua.run(code)
    kind, key = ("F", "train-bert-#") if site_factor == 5 else ("U", "other")
    assert factor == site_factor
    done = f"set site_factor={site_factor} uid={os.getuid()} gpus=2 row={kind} advice=v"
    assert re.fullmatch(rf"almanac: {done} us=\d+ key={key}", logged)
    assert said.startswith(f"almanac: hbm40g is enough: {TEXT}") if kind == "F" else said == ""


def listing(*rows: tuple[str, str]) -> str:
    """A command that says what sinfo does: four nodes with some features in each partition."""
    return f"echo '{chr(10).join(f'{name}|4|64|512000|{features}|gpu:4|infinite|up|all' for name, features in rows)}'"


def filtered(
    lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str, is_fresh: bool = True, **options: str
) -> str:
    """The constraint that cli_filter.lua leaves with ALMANAC_ADVICE=apply, without a terminal. is_fresh: what sinfo
    said before is forgotten.
    """
    if is_fresh:
        (advice / ".local/state/almanac/nodes").unlink(missing_ok=True)
    program = advice / "bin/sinfo"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{sinfo}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(advice))
    monkeypatch.setenv("SINFO_PARTITION", "of somebody who likes to see little")
    monkeypatch.setenv("ALMANAC_ADVICE", "apply")
    for name in ("SLURM_JOB_ID", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    asked: dict[str, Any] = {**GPU_JOB, **{name.replace("_", "-"): value for name, value in options.items()}}
    dirs = {"advice": str(advice), "prompt": str(prompt_program(advice))}
    code = f'local options = {literal(asked)}\ndofile(dir .. "cli_filter.lua").pre_submit(options, 0, {literal(dirs)})'
    ((found,),) = lua.run(f'{code}\nall(options["constraint"])')
    return str(found)


CASES = [
    ({}, True),
    ({"nodelist": ""}, True),
    ({"nodelist": "n3"}, False),
    ({"nodefile": "/nodes"}, False),
    ({"exclude": "n1"}, False),
    ({"reservation": "r"}, False),
    # As real srun has it without and with --jobid.
    ({"type": "srun", "jobid": "unset"}, True),
    ({"type": "srun", "jobid": "12"}, False),
]


@pytest.mark.parametrize(("options", "is_changed"), CASES)
def test_what_may_be_changed(
    lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], is_changed: bool
) -> None:
    found = filtered(lua, advice, monkeypatch, listing(("a*", "gpu,hbm40g")), **options)
    assert found == ("gpu&hbm40g" if is_changed else "gpu&hbm80g")


def test_a_partition_without_the_advised_tier(lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = f'[ -z "$SINFO_PARTITION" ] && {listing(("a", "gpu,hbm40g"), ("b*", "gpu,hbm80g"))}'
    assert filtered(lua, advice, monkeypatch, default) == "gpu&hbm80g"
    for tier, expected in (("hbm80g", "gpu&hbm80g"), ("hbm40g", "gpu&hbm40g")):
        assert filtered(lua, advice, monkeypatch, listing(("a b", f"gpu,{tier}")), partition="a b") == expected


def test_sinfo_is_asked_once_in_a_loop_of_submissions(lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = f"echo x >>{advice}/asked; {listing(('a*', 'gpu,hbm40g'))}"
    for _ in range(3):
        assert filtered(lua, advice, monkeypatch, counted, is_fresh=False) == "gpu&hbm40g"
    assert (advice / "asked").read_text() == "x\n"
    monkeypatch.setenv("SLURM_CONF", "/of/another/cluster")
    assert filtered(lua, advice, monkeypatch, counted, is_fresh=False) == "gpu&hbm40g"
    assert (advice / "asked").read_text() == "x\nx\n"


def test_advice_on_memory_that_is_not_shown_leaves_room_for_another_gpu_type(
    lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = listing(("a*", "gpu,hbm40g,hbm80g,a100"), ("a*", "gpu,hbm80g,h100"))
    asked = {"constraint": "gpu&hbm80g&h100"}
    (advice / "user/_site").mkdir()
    (advice / "user/_site/waits").write_bytes(waits())
    (advice / f"user/{os.getuid()}/times").write_bytes(times("train-bert-#"))
    state = advice / ".local/state/almanac"
    state.mkdir(parents=True)
    (state / "choices").write_text(f"train-bert-#\t2\tnever\thbm40g\t{NOW_S}\n")
    assert filtered(lua, advice, monkeypatch, sinfo, **asked) == "gpu&hbm80g&a100"
    assert filtered(lua, advice, monkeypatch, sinfo, **asked, time="3:00:00") == "gpu&hbm80g&h100"
    (state / "choices").unlink()
    assert filtered(lua, advice, monkeypatch, sinfo, constraint="gpu&hbm80g") == "gpu&hbm40g"


def test_what_sinfo_does_not_say_is_not_offered(lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer after three seconds does not count."""
    for sinfo in (f"sleep 3; {listing(('a*', 'gpu,hbm40g'))}", "exit 1", "echo nonsense; echo 'a|b'"):
        assert filtered(lua, advice, monkeypatch, sinfo) == "gpu&hbm80g"


def waits(age_s: int = 0) -> bytes:
    as_of_s = int(time.time()) - age_s
    rows = (8, TypeWait("a100", 300, 200, 400, as_of_s)), (8, TypeWait("h100", 15_600, 15_000, 16_000, as_of_s))
    return WAITS.render(WaitsFile(as_of_s, tuple(GpuType(name, constraint=name) for name in ("a100", "h100")), rows))


def times(key: str) -> bytes:
    a100 = TypeRunTime("a100", 11_160, 11_000, 12_000, 13_000, 9, "own runs")
    h100 = TypeRunTime("h100", 6_120, 6_000, 7_000, 8_000, 2, "own rates")
    return TIMES.render(times_file(NOW_S, NOW_S + 3600, {(key, 2): (a100, h100)}))


@pytest.mark.parametrize(
    ("age_s", "family", "expected"),
    [(0, "other", "a100"), (500, "other", "a100"), (700, "other", "h100"), (-60, "other", "h100"), (0, "x", "h100")],
)
def test_another_gpu_type_is_asked_for_where_it_ends_first(
    lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch, age_s: int, family: str, expected: str
) -> None:
    """Without waits, with old ones, with those of a clock ahead, and without run times, nothing is changed."""
    sinfo = listing(("a*", "a100"), ("a*", "h100"))
    asked = {"job_name": "other", "constraint": "h100"}
    assert filtered(lua, advice, monkeypatch, sinfo, **asked) == "h100"
    (advice / "user/_site").mkdir()
    (advice / "user/_site/waits").write_bytes(waits(age_s))
    (advice / f"user/{os.getuid()}/times").write_bytes(times(family))
    assert filtered(lua, advice, monkeypatch, sinfo, **asked) == expected
    assert filtered(lua, advice, monkeypatch, listing(("a*", "h100")), **asked) == "h100"  # no node has it


FIELDS = ("name", "features", "partition", "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket",
          "comment", "account", "qos", "gres", "req_nodes", "licenses", "work_dir")  # fmt: skip
OPTIONS = ("job-name", "constraint", "partition", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres",
           "tres-per-task", "nodes", "nodelist", "comment", "wrap")  # fmt: skip
FILLS = ("x", "_", "0", "a1", "abcdef01-abcd-abcd-abcd-abcdef01234-", "gpu:", "gpu,", "gpu:a=1(", "(", "a&", "[a|", "!",
         "\n", "%", "é", "\udce9", "hbm80g&")  # fmt: skip
SIZES = (1_000, 1_024, 1_025, 1_000_000, 10_000_000)
FUZZ = """
io.popen = function() return io.open("/dev/null") end
slurm = { log_info = function() end, log_user = function() end }
local dirs, worst = { advice = %s }, { 0 }
local function seconds_with(field, text)
  local job = %s
  job[field] = text
  local began = os.clock()
  dofile(dir .. "%s.lua").%s(job, %d, dirs)
  return os.clock() - began
end
local fields, sizes = %s, %s
for _, fill in ipairs(%s) do
  for _, size in ipairs(sizes) do
    local text = string.sub(string.rep(fill, math.ceil(size / #fill)), 1, size)
    collectgarbage()
    collectgarbage("stop")
    for _, field in ipairs(fields) do
      local least = seconds_with(field, text)
      for _ = 1, 4 do
        least = least < %g and least or math.min(least, seconds_with(field, text))
      end
      if least > worst[1] then
        worst = { least, field, fill, size }
      end
    end
    collectgarbage("restart")
  end
end
all(worst[1], worst[2], worst[3], worst[4])
"""


def slowest(
    lua: Lua, advice: Path, job: dict[str, Any], fields: tuple[str, ...], call: str, enough_s: float
) -> list[Any]:
    """CPU seconds of the slowest call, the least of five unless it is below enough_s, and what it was made with."""
    script, function = call.split(".")
    named, fills, sizes = (f"{{{', '.join(map(literal, values))}}}" for values in (fields, FILLS, SIZES))
    code = FUZZ % (literal(str(advice)), literal(job), script, function, os.getuid(), named, sizes, fills, enough_s)
    ((*found,),) = lua.run(code)
    return found


def test_no_submission_costs_slurmctld_a_millisecond(lua: Lua, advice: Path) -> None:
    """slurmctld runs it under its locks, before it checks how long anything is."""
    job = {"name": "train-bert-7", "user_id": os.getuid(), "tres_per_job": "gres:gpu:2", "features": "gpu&hbm80g"}
    seconds, *what = slowest(lua, advice, job, FIELDS, "job_submit.submit", 0.0005)
    assert seconds < 0.001, what


def test_no_option_makes_cli_filter_slow(lua: Lua, advice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ADVICE", "apply")
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    seconds, *what = slowest(lua, advice, GPU_JOB, OPTIONS, "cli_filter.pre_submit", 0.0025)
    assert seconds < 0.005, what


def test_a_field_that_slurm_would_refuse_gets_no_site_factor(lua: Lua, advice: Path) -> None:
    """Of 1,024 bytes it does, of one more it does not."""
    code = f"""
    slurm = {{ log_info = function() end, log_user = function() end }}
    local function factor(field, size)
      local job = {{ name = "other", user_id = {os.getuid()}, tres_per_job = "gpu:2", partition = "a", features = "b" }}
      job[field] = job[field] .. string.rep(field == "tres_per_job" and "," or "x", size - #job[field])
      dofile(dir .. "job_submit.lua").submit(job, {os.getuid()}, {{ advice = {literal(str(advice))} }})
      return job.site_factor
    end
    for _, field in ipairs({{ "name", "partition", "features", "tres_per_job" }}) do
      all(factor(field, 1024), factor(field, 1025))
    end
    """
    assert lua.run(code) == [[7 + 8882, None]] * 4
