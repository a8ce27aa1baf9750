"""Our line finds its place in the scripts that sites write, and goes without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import ConfigError
from slurm_hooks.install.guarded_line import (
    HOOKS,
    Hook,
    Places,
    adapted,
    insert,
    is_checked,
    remove,
    syntax_fault,
)

JOB_SUBMIT, CLI_FILTER = HOOKS["job_submit"], HOOKS["cli_filter"]
LUA_DIR = "/usr/share/almanac/lua"
PLACES = Places(LUA_DIR)
STANDALONE = Path(__file__).parents[3] / "slurm_hooks" / "standalone"
CALL = 'pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(job_desc, submit_uid) end);'
SITE = """\
-- function slurm_job_submit(commented, out) is not it
--[[ nor is
function slurm_job_submit(a, b, c) ]]
local text = "function slurm_job_submit(a, b, c)" .. [==[ slurm_job_submit = function(x) ]==]
function slurm_job_submit(job_desc, part_list, submit_uid)
\tif job_desc.name == nil then return slurm.ERROR end
\treturn slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_ptr, part_list, modify_uid)
\treturn slurm.SUCCESS
end
return slurm.SUCCESS
"""


def inserted(script: str, hook: Hook = JOB_SUBMIT, places: Places = PLACES) -> str:
    return insert(script.encode(), hook, places).decode()


def test_the_line_is_the_first_of_the_function_and_nothing_else_changes() -> None:
    lines = SITE.splitlines(keepends=True)
    expected = [*lines[:5], f"\t{CALL} -- almanac\n", *lines[5:]]
    assert inserted(SITE) == "".join(expected)


@pytest.mark.parametrize(
    ("opening", "arguments"),
    [
        ("function slurm_job_submit(job_desc, part_list, submit_uid)", "(job_desc, submit_uid)"),
        ("function slurm_job_submit ( jd,parts , uid )", "(jd, uid)"),
        ("slurm_job_submit = function(j, _, u)", "(j, u)"),
        ("_G.slurm_job_submit = function(j, p, u)", "(j, u)"),
        ("function _G.slurm_job_submit(j, p, u)", "(j, u)"),
        ('_G["slurm_job_submit"]=function(j, p, u)', "(j, u)"),
        ("_G['slurm_job_submit'] = function(j, p, u)", "(j, u)"),
        ("function slurm_job_submit(job_desc)", "(job_desc, nil)"),
        ("function slurm_job_submit(j, _, _)", "(j, _)"),
        ("function -- why\nslurm_job_submit\n(j, --[[ the partitions ]] p, u) -- the user", "(j, u)"),
    ],
)
def test_spellings_of_the_function_and_its_parameters(opening: str, arguments: str) -> None:
    script = f"{opening}\n  return slurm.SUCCESS\nend\n"
    line = f'  pcall(function() dofile("{LUA_DIR}/job_submit.lua").submit{arguments} end); -- almanac\n'
    result = inserted(script)
    assert result == f"{opening}\n{line}  return slurm.SUCCESS\nend\n"
    assert syntax_fault(result.encode()) is None
    assert remove(result.encode(), JOB_SUBMIT).decode() == script


def test_variable_arguments_are_passed_on_by_place() -> None:
    result = inserted("function slurm_job_submit(...)\nend\n")
    called = f'dofile("{LUA_DIR}/job_submit.lua").submit(job_desc, submit_uid)'
    assert f"pcall(function(job_desc, part_list, submit_uid) {called} end, ...); -- almanac\n" in result
    assert syntax_fault(result.encode()) is None
    assert remove(result.encode(), JOB_SUBMIT) == b"function slurm_job_submit(...)\nend\n"


def test_a_function_in_one_line_gets_the_call_within_it() -> None:
    script = "function slurm_job_submit(job_desc, part_list, submit_uid) return slurm.SUCCESS end"
    result = inserted(script)
    assert result == f"{script[:58]} {CALL} --[[almanac]]{script[58:]}"
    assert syntax_fault(result.encode()) is None
    assert remove(result.encode(), JOB_SUBMIT).decode() == script


def test_line_ends_of_dos_and_bytes_of_no_encoding_are_kept() -> None:
    script = b"-- caf\xe9 \xff\r\nfunction slurm_job_submit(a, b, c)\r\n  return 0\r\nend\r\n"
    result = insert(script, JOB_SUBMIT, PLACES)
    assert result.count(b"\r\n") == script.count(b"\r\n") + 1 == result.count(b"\n")
    assert remove(result, JOB_SUBMIT) == script


def test_a_statement_that_starts_with_a_parenthesis_may_follow() -> None:
    """Lua would otherwise take it for a call of what pcall returns."""
    script = "function slurm_job_submit(a, b, c)\n  (print)(1)\nend\n"
    assert syntax_fault(inserted(script).encode()) is None


@pytest.mark.parametrize(
    "script",
    [
        "",
        "return slurm.SUCCESS\n",
        "local function slurm_job_submit(a, b, c) end\n",
        "M.slurm_job_submit = function(a, b, c) end\n",
        "slurm_job_submit = require('site').submit\n",
        "function slurm_job_submit() end\n",
        "function slurm_job_submit(_, _, uid) end\n",
        "function slurm_job_submit(a, b, c) end\nfunction slurm_job_submit(a, b, c) end\n",
        "--[[ function slurm_job_submit(a, b, c) end ]]\n",
        "function slurm_job_submit(a, b",
    ],
)
def test_without_one_clear_place_it_is_refused_with_the_line_to_add_by_hand(script: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inserted(script)
    assert f"{CALL} -- almanac" in caught.value.hint


def test_a_line_that_is_there_is_left_where_the_site_moved_it() -> None:
    lines = inserted(SITE).splitlines(keepends=True)
    moved = "".join([*lines[:5], lines[6], lines[5], *lines[7:]])
    assert inserted(moved) == moved


def test_a_line_with_another_path_or_other_names_is_replaced() -> None:
    assert inserted(inserted(SITE, places=Places("/opt/lua"))) == inserted(SITE)
    renamed = inserted(SITE).replace("(job_desc, part_list, submit_uid)", "(job, parts, uid)")
    assert inserted(renamed) == inserted(SITE.replace("(job_desc, part_list, submit_uid)", "(job, parts, uid)"))


def test_advice_files_elsewhere_are_named_in_the_line() -> None:
    elsewhere = Places(LUA_DIR, "/srv/advice")
    result = inserted(SITE, places=elsewhere)
    assert '.submit(job_desc, submit_uid, {advice = "/srv/advice"}) end); -- almanac\n' in result
    assert syntax_fault(result.encode()) is None
    assert inserted(result) == inserted(SITE), "moved back"
    assert inserted(inserted(SITE), places=elsewhere) == result
    assert remove(result.encode(), JOB_SUBMIT).decode() == SITE


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_the_shipped_stand_alone_scripts_carry_our_line_and_can_do_without(hook: Hook) -> None:
    script = (STANDALONE / hook.script).read_bytes()
    ours = adapted(script, hook, Places("/opt/lua", "/srv/advice"))
    assert b'dofile("/opt/lua/%s").%s(' % (hook.script.encode(), hook.method.encode()) in ours
    assert ours.count(b'{advice = "/srv/advice"}) end); -- almanac\n') == 1
    assert adapted(ours, hook, PLACES) == adapted(script, hook, PLACES)
    without = remove(ours, hook)
    assert without.count(b"\n") == script.count(b"\n") - 1
    assert b"dofile" not in without
    assert syntax_fault(ours) is None
    assert syntax_fault(without) is None


def test_a_call_that_somebody_wrote_without_our_mark_is_not_doubled() -> None:
    own = SITE.replace("\tif", f"\t{CALL}\n\tif")
    assert inserted(own) == own
    assert remove(own.encode(), JOB_SUBMIT).decode() == own


def test_a_line_that_was_commented_out_is_not_ours_to_remove_and_does_not_count() -> None:
    disabled = SITE.replace("\tif", f"\t-- {CALL} -- almanac\n\tif")
    assert remove(disabled.encode(), JOB_SUBMIT).decode() == disabled
    assert inserted(disabled) != disabled


def test_removal_leaves_what_the_site_wrote_since() -> None:
    edited = inserted(SITE).replace("slurm.ERROR", "slurm.SUCCESS").replace(f"\t{CALL}", f"  {CALL}")
    assert remove(edited.encode(), JOB_SUBMIT).decode() == SITE.replace("slurm.ERROR", "slurm.SUCCESS")


PIECES = st.sampled_from(
    ["-- x", "--[[", "]]", "'", '"', "\\", "\n", "\r\n", "\t", "  ", "end", "return 0", "é", "-- almanac", "pcall(f);"]
)
OPENINGS = st.sampled_from(
    [
        "function slurm_job_submit(a, b, c)",
        "slurm_job_submit = function(job, parts, uid)",
        "function slurm_job_submit(...)",
        "\tfunction slurm_job_submit(a)",
    ]
)


@given(st.lists(PIECES).map("".join), OPENINGS, st.lists(PIECES).map("".join), st.sampled_from(["\n", "\r\n", " ", ""]))
def test_what_was_inserted_is_removed_to_the_last_byte(before: str, opening: str, after: str, then: str) -> None:
    script = f"{before}\n{opening}{then}{after}".encode()
    try:
        result = insert(script, JOB_SUBMIT, PLACES)
    except ConfigError:
        return  # the opening is in a comment or a string there
    assert result != script
    assert remove(result, JOB_SUBMIT) == script
    assert insert(result, JOB_SUBMIT, PLACES) == result


@given(st.text())
def test_any_text_is_taken_or_refused_in_words(text: str) -> None:
    for hook in HOOKS.values():
        assert remove(text.encode(), hook) == text.encode()
        with pytest.raises(ConfigError):
            insert(text.encode(), hook, PLACES)


@pytest.mark.skipif(not is_checked(), reason="no Lua library or luac here")
def test_faults_of_syntax_are_told() -> None:
    assert syntax_fault(SITE.encode()) is None
    assert syntax_fault(b"") is None
    fault = syntax_fault(b"function f(\n")
    assert fault
    assert "near" in fault
    assert syntax_fault(b"\x1bLua") == "it is compiled"
