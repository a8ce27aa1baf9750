"""Whether a Lua script parses, asked of the Lua library that Slurm's plugins use, or of luac. The script is not run."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

from almanac import bounded
from almanac.errors import ConfigError

LIBRARIES = ("liblua5.1.so.0", "liblua-5.1.so", "liblua5.3.so.0", "liblua5.4.so.0", "liblua-5.4.so", "liblua.so.5.4")
COMPILERS = ("luac5.1", "luac", "luac5.3", "luac5.4")


def syntax_fault(script: bytes) -> str | None:
    """What every Lua found here says against the script; None where one of them takes it, or there is none."""
    if script.startswith(b"\x1b"):
        return "it is compiled"
    faults = []
    for fault in _verdicts(script):
        if not fault:
            return None
        faults.append(fault)
    return faults[0] if faults else None


def is_checked() -> bool:
    """Whether there is a Lua here to ask."""
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
