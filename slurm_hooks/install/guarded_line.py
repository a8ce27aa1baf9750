"""The one line by which a site's own Lua script calls us: find its place, put it in, and take it out again.

A script is bytes of any encoding; it is handled as Latin-1, which loses none of them. The Lua library that Slurm's
plugins use, or luac, is asked if the script parses. The script is not run.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from almanac import bounded
from almanac.errors import ConfigError

HookKind = Literal["job_submit", "cli_filter"]


@dataclass(frozen=True)
class Hook:
    """A script that Slurm runs: its file, its function, and which of the function's arguments our module wants."""

    kind: HookKind
    function: str
    method: str
    wanted: tuple[int, ...]
    arguments: tuple[str, ...]
    slurm_conf_key: str

    @property
    def script(self) -> str:
        return f"{self.kind}.lua"


HOOKS: dict[HookKind, Hook] = {
    "job_submit": Hook(
        "job_submit",
        "slurm_job_submit",
        "submit",
        (0, 2),
        ("job_desc", "part_list", "submit_uid"),
        "JobSubmitPlugins",
    ),
    "cli_filter": Hook(
        "cli_filter", "slurm_cli_pre_submit", "pre_submit", (0, 1), ("options", "offset"), "CliFilterPlugins"
    ),
}


@dataclass(frozen=True)
class Places:
    """Folders of the modules and, if it is not the usual one, of the advice files."""

    lua_dir: str = "/usr/share/almanac/lua"
    advice_dir: str = ""


MARK = "-- almanac"
"""Ends our line."""
INLINE_MARK = "--[[almanac]]"
"""Ends our statement where the function goes on in the same line."""

_TOKEN = re.compile(
    r"""\A\#[^\n]*|--\[(=*)\[.*?(?:\]\1\]|\Z)|--[^\n]*|\[(=*)\[.*?(?:\]\2\]|\Z)|"(?:\\.|[^"\\\n])*(?:"|(?=\n)|\\?\Z)"""
    r"""|'(?:\\.|[^'\\\n])*(?:'|(?=\n)|\\?\Z)"""
    r"""|[A-Za-z_]\w*|\.\.\.|\s+|.""",
    re.DOTALL | re.ASCII,
)


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int

    @property
    def is_space(self) -> bool:
        return self.text.isspace()

    @property
    def is_comment(self) -> bool:
        return self.text.startswith("--") or (self.start == 0 and self.text.startswith("#"))


@dataclass(frozen=True)
class Definition:
    """The place of a global function: its parameters, and where their closing parenthesis ends."""

    parameters: tuple[str, ...]
    start: int
    end: int


def tokens(script: str, start: int = 0) -> Iterator[Token]:
    """Lua's tokens as far as they matter here: comments, strings, names, blanks; anything else one by one."""
    for match in _TOKEN.finditer(script, start):
        yield Token(match[0], match.start(), match.end())


def definitions(script: str, function: str) -> list[Definition]:
    """Every definition of a global function, in the spellings `function f(a)`, `f = function(a)`, `_G.f`, `_G["f"]`.

    What stands in comments and strings is none, and neither is a local function, which Slurm would not see.
    """
    code = [token for token in tokens(script) if not token.is_space and not token.is_comment]
    texts = [token.text for token in code]
    names = ([function], ["_G", ".", function], ["_G", "[", f'"{function}"', "]"], ["_G", "[", f"'{function}'", "]"])
    openings = [["function", *name, "("] for name in names[:2]] + [[*name, "=", "function", "("] for name in names]
    found = []
    for at in range(len(code)):
        before = texts[at - 1] if at else ""
        for opening in openings:
            first = at + len(opening)
            if texts[at:first] == opening and before not in ("local", ".", ":") and ")" in texts[first:]:
                last = texts.index(")", first)
                parameters = tuple(text for text in texts[first:last] if text != ",")
                found.append(Definition(parameters, code[at].start, code[last].end))
    return found


def statement(hook: Hook, places: Places, parameters: tuple[str, ...]) -> str:
    """The guarded call, with the names that the site gives to the parameters; a parameter it leaves out is nil.

    The module is loaded at each call, so that one that is missing, broken or newer never matters. Raises ConfigError
    where the parameters cannot be passed on.
    """
    named = [(index, parameters[index]) for index in hook.wanted if index < len(parameters)]
    if not parameters or any(name in parameters[index + 1 :] for index, name in named):
        raise ConfigError(f"{hook.function}({', '.join(parameters)}) lacks parameters that almanac needs",
                          by_hand(hook, places))  # fmt: skip
    called = f'dofile("{places.lua_dir}/{hook.script}").{hook.method}'
    options = f', {{advice = "{places.advice_dir}"}}' if places.advice_dir else ""
    if "..." in parameters:
        wanted = ", ".join(hook.arguments[index] for index in hook.wanted)
        return f"pcall(function({', '.join(hook.arguments)}) {called}({wanted}{options}) end, {', '.join(parameters)});"
    passed = ", ".join(parameters[index] if index < len(parameters) else "nil" for index in hook.wanted)
    return f"pcall(function() {called}({passed}{options}) end);"


def insert(script: bytes, hook: Hook, places: Places) -> bytes:
    """The script with our line as the first of the hook's function; unchanged if it is there already.

    Raises ConfigError, with the line to add by hand, where the function is not found exactly once.
    """
    text = script.decode("latin-1")
    found = definitions(text, hook.function)
    if len(found) != 1:
        seen = f"{len(found)} definitions" if found else "no definition"
        raise ConfigError(f"{hook.script} has {seen} of the global function {hook.function}", by_hand(hook, places))
    line = statement(hook, places, found[0].parameters)
    without = remove(script, hook)
    if (without != script and line in text) or _unmarked(hook).search(without.decode("latin-1")):
        return script
    text = without.decode("latin-1")
    (place,) = definitions(text, hook.function)
    return _inserted(text, place, line).encode("latin-1")


def _inserted(text: str, place: Definition, line: str) -> str:
    """In a line of its own if nothing else follows the parameters in theirs."""
    for token in tokens(text, place.end):
        if token.is_space and "\n" in token.text:
            at = token.start + token.text.index("\n") + 1
            newline = "\r\n" if text[at - 2 : at] == "\r\n" else "\n"
            return f"{text[:at]}{_indent(text, place, at)}{line} {MARK}{newline}{text[at:]}"
        if not token.is_space and not token.is_comment:
            break
    return f"{text[: place.end]} {line} {INLINE_MARK}{text[place.end :]}"


def _indent(text: str, place: Definition, at: int) -> str:
    """Return the indent of the next line with text in it, if it is deeper than the function's own."""
    own = re.match(r"[ \t]*", text[text.rfind("\n", 0, place.start) + 1 :])
    following = re.match(r"(?:[ \t]*\r?\n)*([ \t]*)", text[at:])
    here, there = own[0] if own else "", following[1] if following else ""
    return there if len(there) > len(here) else here + "    "


def remove(script: bytes, hook: Hook) -> bytes:
    """The script without our marked lines, whatever module path and names they have; all else is left as it is."""
    call = _call_pattern(hook)
    text = re.sub(rf"(?m)^[ \t]*{call} {MARK}[ \t]*(?:\r?\n|\Z)", "", script.decode("latin-1"))
    return re.sub(rf" ?{call} {re.escape(INLINE_MARK)}", "", text).encode("latin-1")


def adapted(standalone: bytes, hook: Hook, places: Places) -> bytes:
    """A stand-alone script with its call marked as ours, and our places in it."""
    ours = f"{statement(hook, places, hook.arguments)} {MARK}"
    pattern = rf"(?m)^([ \t]*){_call_pattern(hook)}(?: {MARK})?[ \t]*$"
    return re.sub(pattern, lambda match: match[1] + ours, standalone.decode("latin-1")).encode("latin-1")


def _call_pattern(hook: Hook) -> str:
    called = rf'dofile\("[^"\n]*/{re.escape(hook.script)}"\)\.{hook.method}'
    return rf"pcall\(function\([\w, ]*\) {called}\([\w, ]*(?:\{{[^{{}}\n]*\}})?\) end(?:, [\w, .]+)?\);?"


def _unmarked(hook: Hook) -> re.Pattern[str]:
    """A call of our module without our mark, in a line that is no comment."""
    return re.compile(rf'(?m)^(?:(?!--).)*dofile\("[^"\n]*/{re.escape(hook.script)}"\)\.{hook.method}\(')


def by_hand(hook: Hook, places: Places) -> str:
    """Say how to add the line by hand."""
    line = statement(hook, places, hook.arguments)
    return f"nothing was written; add as the first line of the function, with its own parameters: {line} {MARK}"


LIBRARIES = ("liblua5.1.so.0", "liblua-5.1.so", "liblua5.3.so.0", "liblua5.4.so.0", "liblua-5.4.so", "liblua.so.5.4")
COMPILERS = ("luac5.1", "luac", "luac5.3", "luac5.4")


def syntax_fault(script: bytes) -> str | None:
    """Return the first fault that a Lua of this host finds; None if one accepts the script, or there is no Lua."""
    if script.startswith(b"\x1b"):
        return "it is compiled"
    faults = []
    for fault in _verdicts(script):
        if not fault:
            return None
        faults.append(fault)
    return faults[0] if faults else None


def is_checked() -> bool:
    """Return True if this host has a Lua to ask."""
    return next(_verdicts(b""), None) is not None


def _verdicts(script: bytes) -> Iterator[str]:
    """The fault that each Lua of this machine finds; empty for none."""
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        yield _library_fault(library, script)
    for program in filter(None, map(shutil.which, COMPILERS)):
        try:
            done = bounded.run([program, "-p", "-"], stdin=script, timeout_s=30, most_bytes=1 << 20)
        except (OSError, ValueError, ConfigError) as error:
            yield f"{program}: {error}"
        else:
            yield done.stderr.decode(errors="replace").strip() if done.code else ""


def _library_fault(library: ctypes.CDLL, script: bytes) -> str:
    library.luaL_newstate.restype = ctypes.c_void_p
    library.lua_tolstring.restype = ctypes.c_char_p
    state = ctypes.c_void_p(library.luaL_newstate())
    arguments = [state, ctypes.c_char_p(script), ctypes.c_size_t(len(script)), ctypes.c_char_p(b"=line")]
    try:
        if hasattr(library, "luaL_loadbufferx"):  # from Lua 5.2; "t": text only
            code = library.luaL_loadbufferx(*arguments, ctypes.c_char_p(b"t"))
        else:
            code = library.luaL_loadbuffer(*arguments)
        message = library.lua_tolstring(state, ctypes.c_int(-1), None) if code else b""
        return (message or b"unknown fault").decode(errors="replace") if code else ""
    finally:
        library.lua_close(state)
