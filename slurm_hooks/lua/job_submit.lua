-- job_submit.lua: the priority term of a submission, out of the advice files. The site's own job_submit.lua has
--   pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(job_desc, submit_uid) end)
-- as the first line of its slurm_job_submit: loaded anew at each call, so that a module which is missing, broken or
-- upgraded changes nothing but the term. It runs inside slurmctld under its locks: it reads at most two small files.

local began = os.clock()
local M = {}

local ADVICE_DIR = "/var/lib/almanac-advice"
local WAYS = { "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket" }
local GREATEST = 2147483645 -- of a site factor; NO_VAL, 4294967294, where there is none

local function own_dir()
  return string.match(debug.getinfo(1, "S").source, "^@(.*/)") or "/usr/share/almanac/lua/"
end

-- A module's functions. Compiling costs more than all the rest: what was compiled is kept while the text stays the same.
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

-- Most submissions of a mixed site: nothing more is loaded for them.
local function asks_no_gpu(job)
  for _, way in ipairs(WAYS) do
    if string.find(job[way] or "", "gpu", 1, true) then
      return false
    end
  end
  return true
end

local function is_uid(value)
  return type(value) == "number" and value >= 0 and value < 4294967294
end

-- The row for a submission and the file that has it; nil where nothing is known.
local function look_up(almanac, dir, uid, job, gpus, now)
  local user = almanac.read_advice(string.format("%s/sched/%d", dir, uid), now)
  local key = almanac.job_key(job.name)
  if user then
    local row = almanac.find(user, key, gpus)
    if row then
      return row, user, key
    end
  end
  local site = almanac.read_advice(dir .. "/sched/_site", now)
  return site and almanac.find_any(site, gpus), site, key
end

-- A term that the site's script has set is its own: Slurm itself hands every submission over without one.
local function set_term(job, mode, term)
  if mode ~= "apply" then
    return mode
  end
  local present = job.site_factor
  if type(present) == "number" and present <= GREATEST then
    return "kept"
  end
  job.site_factor = math.min(term, GREATEST)
  return "set"
end

local function tell(almanac, lua_dir, job, row, advice)
  local text = almanac.sentences(row)
  if not text then
    return
  end
  local asked = row.tier and load_module(lua_dir .. "tiers.lua").requested_tier(almanac.request_of_job(job), advice.tiers)
  if not asked or asked.name ~= row.tier then
    slurm.log_user("%s", "almanac: " .. text)
  end
end

local function run(job, submit_uid, dirs)
  if asks_no_gpu(job) then
    return
  end
  local lua_dir = dirs.lua or own_dir()
  local almanac = load_module(lua_dir .. "almanac.lua")
  local gpus = almanac.gpus_of_job(job)
  local uid = is_uid(job.user_id) and job.user_id or submit_uid
  if not gpus or gpus <= 0 or not is_uid(uid) then
    return
  end
  local row, advice, key = look_up(almanac, dirs.advice or ADVICE_DIR, uid, job, gpus, os.time())
  if not row then
    return
  end
  if advice.mode ~= "off" then
    local done = set_term(job, advice.mode, row.term)
    slurm.log_info(
      "almanac: %s term=%d uid=%d gpus=%d row=%s advice=%s us=%d key=%s",
      done, row.term, uid, gpus, row.kind, advice.version, (os.clock() - began) * 1e6, key
    )
  end
  if advice.tell then
    tell(almanac, lua_dir, job, row, advice)
  end
end

-- Never raises. dirs: advice, the root of the advice files, and lua, where the modules are (ending in "/"), where
-- they are not in their usual places.
function M.submit(job_desc, submit_uid, dirs)
  pcall(run, job_desc, submit_uid, dirs or {})
end

return M
