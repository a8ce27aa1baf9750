-- cli_filter.lua: advice in sbatch, srun, and salloc for a user at a terminal. The site's own cli_filter.lua has
--   pcall(function() dofile("/usr/share/almanac/lua/cli_filter.lua").pre_submit(options, offset) end)
-- as the first line of its slurm_cli_pre_submit. It runs as the user. Every submission compiles this file, so it only
-- tests whether a user may be at a terminal; dialogue.lua does the rest.

local M = {}

-- Whether our process group has the terminal: in the background a question would stop us.
-- /proc/self/stat: pid (name) state ppid pgrp session tty tpgid ...; the name may hold anything, ")" too.
local function is_foreground()
  local file = io.open("/proc/self/stat", "r")
  local stat = file and file:read(4096) or ""
  if file then
    file:close()
  end
  local group, terminal, owner = string.match(stat, "^.*%) %S %d+ (%d+) %d+ (%-?%d+) (%-?%d+)")
  return terminal ~= "0" and owner ~= nil and group == owner
end

local function run(options, offset, dirs)
  local mode = os.getenv("ALMANAC_ADVICE")
  if mode == "off" or os.getenv("SLURM_JOB_ID") or (mode ~= "apply" and not is_foreground()) then
    return
  end
  local own_dir = string.match(debug.getinfo(1, "S").source, "^@(.*/)") or "/usr/share/almanac/lua/"
  local lua_dir = dirs.lua or own_dir
  dofile(lua_dir .. "dialogue.lua").run(options, mode, dirs.advice or "/var/lib/almanac-advice", lua_dir, offset)
end

-- Never raises. dirs: advice (root of the advice files) and lua (folder of the modules, ending in "/"), where these are
-- not in their usual places. The components of a het job come one by one; each is asked about at most once.
function M.pre_submit(options, offset, dirs)
  pcall(run, options, offset, dirs or {})
end

return M
