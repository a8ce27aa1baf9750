-- cli_filter.lua: advice inside sbatch, srun and salloc, for somebody at a terminal. The site's own cli_filter.lua has
--   pcall(function() dofile("/usr/share/almanac/lua/cli_filter.lua").pre_submit(options, offset) end)
-- as the first line of its slurm_cli_pre_submit. It runs as the user, reads the user's one advice file, and starts
-- programs only when it has something to say: sh, to look whether this is a terminal and to make a folder; sinfo, as
-- the partition may have no nodes of the advised tier.
-- Loading it is a part of every submission: this file is short and finds out whether there is anybody to ask, and
-- dialogue.lua does the rest.

local M = {}

local COMMANDS = { sbatch = true, srun = true, salloc = true }
local MODES = { off = true, show = true, ask = true, apply = true }
-- sbatch-almanac leaves an open file with this number whose offset ends in 1 where it has said something already.
local MARK, MARKED = "/proc/self/fdinfo/719", "pos:%s*71900000000%d%d%d1%s"

local getenv = os.getenv

local function own_dir()
  return string.match(debug.getinfo(1, "S").source, "^@(.*/)") or "/usr/share/almanac/lua/"
end

-- The beginning of a file of /proc, "" where there is none.
local function proc(path)
  local file = io.open(path, "r")
  local text = file and file:read(4096) or ""
  if file then
    file:close()
  end
  return text
end

-- What a user said or did by which nothing is said and nothing is changed. A number of srun's jobid names the job that a
-- step is for; without one it is "unset".
local function is_out(options, mode)
  return mode == "off" or getenv("SLURM_JOB_ID") or not COMMANDS[options["type"]] or options["test-only"] == "set"
    or options["clusters"] or string.find(options["jobid"] or "", "^%d") or string.find(proc(MARK), MARKED)
end

local function is_quiet(options)
  return options["parsable"] == "set" or (tonumber(options["quiet"]) or 0) > 0
end

-- Whether our process group has the terminal: in the background a question would stop us.
-- /proc/self/stat: pid (name) state ppid pgrp session tty tpgid ...; the name may hold anything, ")" too.
local function is_foreground()
  local group, terminal, owner = string.match(proc("/proc/self/stat"), "^.*%) %S %d+ (%d+) %d+ (%-?%d+) (%-?%d+)")
  return terminal ~= "0" and owner ~= nil and group == owner
end

local function run(options, dirs)
  local mode = getenv("ALMANAC_ADVICE")
  mode = MODES[mode] and mode or nil
  if is_out(options, mode) or (mode ~= "apply" and (is_quiet(options) or not is_foreground())) then
    return
  end
  local lua_dir = dirs.lua or own_dir()
  dofile(lua_dir .. "dialogue.lua").run(options, mode, dirs.advice or "/var/lib/almanac-advice", lua_dir, proc)
end

-- Never raises. dirs: advice, the root of the advice files, and lua, where the modules are (ending in "/"), where
-- they are not in their usual places. Components of a het job come one by one; each is asked for at most once.
function M.pre_submit(options, offset, dirs)
  pcall(run, options, dirs or {})
end

return M
