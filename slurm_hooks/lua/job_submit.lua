-- job_submit.lua: sets the site factor of a submission from the advice files. The site's own job_submit.lua has
--   pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(job_desc, submit_uid) end)
-- as the first line of its slurm_job_submit. The file is loaded again at each call, so a missing, broken, or upgraded
-- module changes only the site factor. Each call compiles it, so it is short; submission.lua does the work.

local began = os.clock()
local M = {}

local function own_dir()
  return string.match(debug.getinfo(1, "S").source, "^@(.*/)") or "/usr/share/almanac/lua/"
end

-- A module's functions. What was compiled is kept while the text stays the same: reading it again costs 5 us.
local function load_module(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read(65536)
  file:close()
  local kept = package.loaded[path]
  if kept and kept.text == text then
    return kept.module
  end
  local module = assert((loadstring or load)(text, "@" .. path))()
  package.loaded[path] = { text = text, module = module }
  return module
end

local function run(job_desc, submit_uid, dirs)
  local dir = dirs.lua or own_dir()
  local function module(name)
    return load_module(dir .. name .. ".lua")
  end
  module("submission").run(job_desc, submit_uid, dirs.advice or "/var/lib/almanac-advice", module, began)
end

-- Never raises. dirs: advice, the root of the advice files, and lua, where the modules are (ending in "/"), where
-- they are not in their usual places.
function M.submit(job_desc, submit_uid, dirs)
  pcall(run, job_desc, submit_uid, dirs or {})
end

return M
