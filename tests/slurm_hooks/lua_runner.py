"""Calls the functions of slurm_hooks/lua from Python: arguments go in as Lua literals, results come back as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LUA_DIR = Path(__file__).resolve().parents[2] / "slurm_hooks" / "lua"
INTERPRETERS = ("lua5.1", "lua5.4")
PROMPT = """#!{python} -I
import sys
sys.path.insert(0, {root!r})
from slurm_hooks.submit.prompt import main
main()
"""
ENCODER = r"""
local function text(s)
  return '"' .. string.gsub(s, "[^ !#-%[%]-~]", function(c) return string.format("\\u%04x", string.byte(c)) end) .. '"'
end
local function encode(v)
  if type(v) == "string" then return text(v) end
  if type(v) == "number" then return v == math.floor(v) and string.format("%.0f", v) or string.format("%.17g", v) end
  if type(v) ~= "table" then return tostring(v == nil and "null" or v) end
  local parts = {}
  for k, x in pairs(v) do parts[#parts + 1] = text(tostring(k)) .. ":" .. encode(x) end
  return "{" .. table.concat(parts, ",") .. "}"
end
local function all(...)
  local parts = {}
  for i = 1, select("#", ...) do parts[i] = encode((select(i, ...))) end
  print("[" .. table.concat(parts, ",") .. "]")
end
"""


def prompt_program(folder: Path) -> Path:
    """almanac-prompt as a package installs it, of this checkout."""
    path = folder / "almanac-prompt"
    path.write_text(PROMPT.format(python=sys.executable, root=str(LUA_DIR.parents[1])))
    path.chmod(0o755)
    return path


class Lua:
    """One interpreter; `almanac` and `tiers` are the loaded modules, `dir` the folder they are in."""

    def __init__(self, interpreter: str) -> None:
        self.interpreter = interpreter

    def run(self, code: str) -> list[list[Any]]:
        """The values of every all(...) of the code. Bytes above 0x7f come back as the characters of Latin-1."""
        head = f"{ENCODER}\nlocal dir = {literal(f'{LUA_DIR}/')}\n"
        head += 'local almanac, tiers = dofile(dir .. "almanac.lua"), dofile(dir .. "tiers.lua")\n'
        done = subprocess.run([self.interpreter, "-"], input=(head + code).encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[:2000]
        return [json.loads(line) for line in done.stdout.decode().splitlines()]

    def calls(self, function: str, arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Call a function with each of several lists of arguments, and return its results."""
        lines = (f"all({function}({', '.join(map(literal, row))}))" for row in arguments)
        return self.run("\n".join(lines))

    def call(self, function: str, *arguments: Any) -> list[Any]:
        return self.calls(function, [arguments])[0]


def literal(value: Any) -> str:
    """A Python value as Lua writes it; text as its UTF-8 bytes, surrogates as the bytes they stand for."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return '"' + "".join(f"\\{byte:03d}" for byte in value) + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"[{literal(key)}] = {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "{" + ", ".join(map(literal, value)) + "}"
    return repr(value)
