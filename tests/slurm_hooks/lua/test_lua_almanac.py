"""almanac.lua: advice files, name keys, GPU requests, and the site factor have the same results as in Python."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lua_runner import LUA_DIR, Lua, literal
from profiles import examples

from advisor.priority import site_factor
from almanac import names
from almanac.config import Priority
from almanac.names import name_key
from almanac.tres import Gpus, parse_gpus

VECTORS = Path(__file__).parents[1] / "vectors"
LOOKUPS = json.loads((VECTORS / "lookups.json").read_text())
NOW_S = LOOKUPS["now_s"]
NAMES = json.loads((resources.files("almanac") / "name_mask_vectors.json").read_text(encoding="utf-8"))
HOSTILE = [
    "%d+", "%", "%%n", "[", "[a", "(", "%b()", "^$", "-", ".-", "a\nb", "a\tb", "\x1b[31mred", "\x00\x01", "$(reboot)",
    "`id`", "';\"", "é\u202e", "\udcff\udcfe", "x" * 10_240, "%" * 10_240, "[" * 10_240, "a1" * 5000, "-" * 10_240,
    "F\tx\t1\t1\t1\t-\t-\t-\t-", "end\t0\n",
]  # fmt: skip

ALLOWED = {
    "assert", "debug", "dofile", "io", "ipairs", "load", "loadstring", "math", "next", "os", "package", "pairs",
    "pcall", "slurm", "string", "table", "tonumber", "tostring", "type",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("luac5.1") is None, reason="lua5.1 is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in LUA_DIR.glob("*.lua")))
def test_no_module_sets_a_global_and_slurmctlds_can_neither_run_a_program_nor_wait_for_one(name: str) -> None:
    listed = subprocess.run(["luac5.1", "-l", "-p", LUA_DIR / name], capture_output=True, text=True, check=True).stdout
    assert "SETGLOBAL" not in listed
    assert set(re.findall(r"GETGLOBAL.*; (\w+)", listed)) <= ALLOWED
    text = (LUA_DIR / name).read_text()
    if name != "cli_filter.lua":
        assert "dofile" not in re.sub("--.*", "", text)
        assert set(re.findall(r"\b(?:io|os)\.(\w+)", text)) <= {"open", "clock", "time"}
    assert set(re.findall(r"\bpackage\.(\w+)", text)) <= {"loaded"}


def test_name_keys(lua: Lua) -> None:
    found = lua.calls("almanac.name_key", [(name, *comment) for name, _, *comment in NAMES])
    assert found == [[key] for _, key, *_ in NAMES]


def test_both_languages_know_the_same_generic_names() -> None:
    words, beginnings = names._generic()
    text = (LUA_DIR / "almanac.lua").read_text()
    listed = re.search(r"GENERIC = \[\[\n((?: [^\n]+ \n)+)\]\]", text)
    begun = re.search(r"BEGINNINGS = {(.*?)}", text)
    assert listed is not None and begun is not None
    assert {*words} == {*listed[1].split(), *(f"{each}*" for each in beginnings)}
    assert {*beginnings} == {*re.findall('"(.*?)"', begun[1])}


WORDS = st.sampled_from(
    ["job", "run", "bert", "dask-worker", "uv", "sys/dashboard/", "nf-", "_(", "rule_", "A:B", ":", ",", " "]
)
IDS = st.from_regex(r"[0-9a-f]{4,40}|[0-9A-Za-z]{6,32}|[a-z2-7]{10,32}|[bcdfgjkqvwxz0-9]{6,20}", fullmatch=True)
TEXTS = st.one_of(
    st.text(max_size=80), st.lists(st.one_of(WORDS, IDS, st.sampled_from("-_. #/:")), max_size=6).map("".join)
)


@given(names=st.lists(st.tuples(TEXTS, TEXTS), max_size=30))
@examples(0.3)
def test_name_keys_as_python_makes_them(lua: Lua, names: list[tuple[str, str]]) -> None:
    pairs = [*names, *[(name, "") for name in HOSTILE], *[("a", text) for text in HOSTILE]]
    pairs = [(utf8(name), utf8(comment)) for name, comment in pairs]
    assert lua.calls("almanac.name_key", pairs) == [[name_key(*pair)] for pair in pairs]


def utf8(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def test_the_key_of_a_submission_is_that_of_its_accounting_record(lua: Lua) -> None:
    """slurmdbd keeps a double quote as a backtick."""
    pairs = [('say "hi" 7',), (None,), ("",), (7,), ("wrap", 'rule_say_"hi"'), ("wrap", 7), ("x" * 10**6, "y" * 10**6)]
    found = lua.calls("almanac.job_key", pairs)
    assert found == [["say_`hi`_#"], ["-"], ["-"], ["-"], ["say_`hi`"], ["-"], ["x" * 64]]


def test_look_ups(lua: Lua) -> None:
    """Every broken file too: what Python does not use, Lua does not use."""
    code = f"""
    local function read(name) return name ~= "" and almanac.read_advice({literal(f"{VECTORS}/")} .. name, {NOW_S}) end
    local function try(user, site, key, gpus)
      user, site = read(user), read(site)
      local row, file = almanac.look_up(user or nil, site or nil, key, gpus)
      if not row then return all(nil) end
      all(row, file == user and "user" or "site", file.version, file.mode, file.tell, file.prompt)
    end
    """
    cases = LOOKUPS["lookups"]
    lines = [f"try({', '.join(literal(case[k]) for k in ('user', 'site', 'key', 'gpus'))})" for case in cases]
    for case, found in zip(cases, lua.run(code + "\n".join(lines)), strict=True):
        assert as_vector(found, case["found"]) == case["found"], case


def as_vector(found: list[Any], expected: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the row that Lua found, spelled as in the vectors, whose rows have their own GPU count."""
    if found == [None]:
        return None
    row, of, version, mode, tell, prompt = found
    file = {"from": of, "version": version, "mode": mode, "tell": tell, "prompt": prompt}
    text = {name: row.get(name) or "" for name in ("key", "text")}
    numbers = {name: row.get(name) for name in ("kind", "predicted_s", "site_factor", "bound_mib", "tier")}
    gpus = None if row["kind"] == "U" else row["gpus"]
    assert expected is None or row["kind"] != "U" or expected["gpus"] is None
    return {**file, **numbers, **text, "gpus": gpus}


def test_a_broken_file_is_not_used(lua: Lua) -> None:
    files = sorted((VECTORS / "broken").iterdir())
    assert len(files) > 50
    found = lua.calls("almanac.read_advice", [(str(file), NOW_S) for file in files])
    assert [file.name for file, said in zip(files, found, strict=True) if said not in ([None], [False])] == []


def test_what_is_no_file_is_not_used(lua: Lua, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(50 << 20)
    for name in ("folder", "loop", "sparse", "absent", "x" * 5000, "a\0b"):
        assert lua.call("almanac.read_advice", str(tmp_path / name), NOW_S) in ([None], [False]), name


@given(data=st.data())
@examples(0.4)
def test_a_damaged_file_is_refused_or_read_and_never_raises(lua: Lua, data: st.DataObject) -> None:
    whole = (VECTORS / "good" / "1000").read_bytes()
    texts = []
    for _ in range(20):
        place = data.draw(st.integers(0, len(whole)))
        texts.append(whole[:place] + data.draw(st.binary(max_size=4)) + whole[place + data.draw(st.integers(0, 4)) :])
    found = lua.run("\n".join(f"all(almanac.parse_advice({literal(text)}, {NOW_S}))" for text in texts))
    for text, (advice, *_) in zip(texts, found, strict=True):
        assert (advice is not None) == is_usable(text), text


def is_usable(text: bytes) -> bool:
    from advice_lines import parse

    from almanac.errors import FileFormatError

    try:
        parse(text, NOW_S)
    except FileFormatError:
        return False
    return True


@given(
    seconds=st.lists(st.one_of(st.integers(0, 10**12), st.integers(1, 10_000)), min_size=1, max_size=50),
    scale=st.one_of(st.integers(1, 1_000_000), st.decimals("0.5", 1000, places=3)),
    least=st.integers(1, 10_000),
    span=st.integers(2, 10_000),
)
@examples(0.4)
def test_the_site_factor_is_that_of_python(lua: Lua, seconds: list[int], scale: float, least: int, span: int) -> None:
    priority = Priority(points_per_e=float(scale), min_gpu_time_s=float(least), max_gpu_time_s=float(least * span))
    scale = {"k": float(scale), "min": float(least), "max": float(least * span)}
    found = lua.calls("almanac.site_factor", [(second, scale) for second in seconds])
    assert found == [[site_factor(second, priority)] for second in seconds]


def test_the_term_by_hand(lua: Lua) -> None:
    """1000 ln(8640000 / 16200) = 6279.2; half goes to the even number, as Python rounds."""
    scale = {"k": 1000.0, "min": 60.0, "max": 8_640_000.0}
    assert lua.calls("almanac.site_factor", [(16_200, scale), (1, scale), (10**9, scale)]) == [[6279], [11878], [0]]


TERMS = [
    "gpu", "gpu:2", "gpu:a100:2", "gpu:a100", "gres:gpu:2", "gres/gpu:2", "gres/gpu=2", "gres/gpu:a100=2", "gres:gpu",
    "gres/gpu", "gres/gpu:1g.5gb:3", "gpu:3090:2", "gpu:2080ti", "gpu:0", "nvme:1", "gres:nvme:1", "cpu=4", "gpu_mem:4",
    "shard:4", "mps:100", "gpux", "license:gpu", "billing=3", "gres/gpu:a100=1,gres/gpu=4", "gpu:a100:1,gpu:v100:2",
    "cpu=4,gres/gpu=1", "gpu:2,nvme:1", "",
]  # fmt: skip


def test_gpus_of_a_text(lua: Lua) -> None:
    found = lua.calls("almanac.parse_gpus", [(text,) for text in TERMS])
    assert {text: Gpus(*gpus) for text, gpus in zip(TERMS, found, strict=True)} == {
        text: parse_gpus(text) for text in TERMS
    }


UNREADABLE = ["gpu:", "gpu:x:y:z", "gpu:1.5:", "gpu:1234567890", "gpu/2", "gpu=a100", "gpu:a b:2",
              "gpu:%d", "gpu:2(S:0)", "gpu:2,gpu:$(id):1:1"]  # fmt: skip


def test_a_gpu_text_that_cannot_be_read_is_unknown(lua: Lua) -> None:
    found = lua.calls("almanac.parse_gpus", [(text,) for text in UNREADABLE])
    found += lua.calls("almanac.gpus_of_job", [({"tres_per_node": text},) for text in UNREADABLE])
    assert [said[0] for said in found] == [None] * 2 * len(UNREADABLE)


NO_VAL, NO_VAL16 = 4294967294, 65534
JOBS = [
    # As the hook sees them on 22.05 and on 24.11 and 26.05.
    ({}, [0, ""]),
    ({"tres_per_task": "cpu=4"}, [0, ""]),
    ({"tres_per_node": "gres:gpu:2"}, [2, ""]),
    ({"tres_per_node": "gres/gpu:2"}, [2, ""]),
    ({"tres_per_node": "gres:gpu"}, [1, ""]),
    ({"tres_per_node": "gres/gpu:a100:2", "min_nodes": 3}, [6, "a100"]),
    ({"tres_per_node": "gres:gpu:2", "num_tasks": 8, "ntasks_per_node": 4}, [4, ""]),
    ({"tres_per_node": "gres:gpu:2", "num_tasks": 5}, [2, ""]),
    ({"tres_per_job": "gres:gpu:7", "min_nodes": 4}, [7, ""]),
    ({"tres_per_job": "gres/gpu:8", "tres_per_node": "gres/gpu:4"}, [8, ""]),
    ({"tres_per_task": "gres:gpu:1", "num_tasks": 2}, [2, ""]),
    ({"tres_per_task": "gres/gpu=1", "num_tasks": 2}, [2, ""]),
    ({"tres_per_task": "cpu=4,gres/gpu:a100=2", "num_tasks": 3}, [6, "a100"]),
    ({"tres_per_task": "gres/gpu=1", "min_nodes": 2, "ntasks_per_node": 3}, [6, ""]),
    ({"tres_per_task": "gres/gpu=1"}, [1, ""]),
    ({"tres_per_socket": "gres/gpu:1", "sockets_per_node": 2, "min_nodes": 2}, [4, ""]),
    ({"tres_per_socket": "gres/gpu:1"}, [1, ""]),
    ({"tres_per_node": "gres/gpu:0"}, [0, ""]),
    ({"tres_per_node": "gres/gpu:a100:0"}, [0, ""]),
    ({"tres_per_node": "gres/nvme:1"}, [0, ""]),
    ({"tres_per_node": "gres/gpu:a:b:c"}, [None]),
    ({"tres_per_node": 5}, [0, ""]),
]


def test_gpus_of_a_job_desc(lua: Lua) -> None:
    """Slurm gives NO_VAL or nil for an absent number."""
    unset = {"min_nodes": NO_VAL, "num_tasks": NO_VAL, "ntasks_per_node": NO_VAL16, "sockets_per_node": NO_VAL16}
    for blank in ({}, unset):
        found = lua.calls("almanac.gpus_of_job", [({**blank, **fields},) for fields, _ in JOBS])
        assert list(zip((fields for fields, _ in JOBS), found, strict=True)) == JOBS


@pytest.mark.parametrize(
    ("job", "is_one"),
    [
        ({"tres_per_job": "gres:gpu:1"}, True),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 1, "max_nodes": 1}, True),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 1, "max_nodes": 4}, False),
        ({"tres_per_node": "gres:gpu:1", "min_nodes": 2, "max_nodes": 2}, False),
        ({"tres_per_node": "gres:gpu:1", "num_tasks": 2}, False),
        ({"tres_per_job": "gres:gpu:1", "num_tasks": 2}, True),
        ({"tres_per_job": "gres:gpu:1", "shared": 0}, False),
        ({"tres_per_job": "gres:gpu:1", "shared": 65534, "max_nodes": 4294967294}, True),
        ({"tres_per_job": "gres:gpu:2"}, False),
    ],
)
def test_what_job_submit_sees(lua: Lua, job: dict[str, Any], is_one: bool) -> None:
    (found,) = lua.call("almanac.request_of_job", job)
    assert lua.call("tiers.is_one_gpu", {k: found.get(k) for k in ("gpu_count", "may_use_more")}) == [is_one]


def test_hostile_requests_never_raise(lua: Lua) -> None:
    lua.calls("almanac.gpus_of_job", [({"tres_per_node": f"gres:gpu:{text}"},) for text in HOSTILE])


def test_the_sentences_for_a_user(lua: Lua) -> None:
    row = {"text": "It ran.", "tier": "hbm40g", "waits": "hbm40g=12 min;hbm80g=3 h"}
    assert lua.call("almanac.sentences", row) == ["hbm40g is enough: It ran."], "waits of the release before"
    assert lua.call("almanac.sentences", {"text": "It ran."}) == ["It ran."]
    assert lua.call("almanac.sentences", {"tier": "hbm40g"}) == [None]
