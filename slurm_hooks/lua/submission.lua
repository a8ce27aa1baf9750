-- submission.lua: sets the site factor of a submission for job_submit.lua. It runs in slurmctld under its locks, so it
-- reads at most two small files and writes one line to the log.

local M = {}

local WAYS = { "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket" }
local OTHERS = { "name", "features", "partition" }
local MAX_BYTES = 1024
local GREATEST = 2147483645 -- of a site factor; NO_VAL, 4294967294, where there is none

-- Whether one of these fields is longer than slurmctld accepts. slurmctld checks that after job_submit, so a field of
-- megabytes can come here, and slurmctld would serve nobody while it is searched.
local function is_oversized(job, fields)
  for _, field in ipairs(fields) do
    if #(job[field] or "") > MAX_BYTES then
      return true
    end
  end
  return false
end

-- True for most submissions of a mixed site; nothing more is loaded for them.
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

-- The row for a submission, its file, and its key; the row is nil where no file has one.
local function look_up(almanac, dir, uid, job, gpus, now)
  local user = almanac.read_advice(string.format("%s/sched/%d", dir, uid), now)
  local key = almanac.job_key(job.name, job.comment)
  if user then
    local row = almanac.find(user, key, gpus)
    if row then
      return row, user, key
    end
  end
  local site = almanac.read_advice(dir .. "/sched/_site", now)
  return site and almanac.find_any(site, gpus), site, key
end

-- Keeps a site factor that the site's own script has set: Slurm hands every submission over without one.
local function set_site_factor(job, mode, site_factor)
  if mode ~= "apply" then
    return mode
  end
  local present = job.site_factor
  if type(present) == "number" and present <= GREATEST then
    return "kept"
  end
  job.site_factor = math.min(site_factor, GREATEST)
  return "set"
end

-- Whether the row's tier is a MIG slice, which only a job of one GPU can use.
local function is_slice(row, advice)
  for _, tier in ipairs(advice.tiers) do
    if tier.name == row.tier then
      return tier.compute_slices ~= nil
    end
  end
  return false
end

local function tell(module, almanac, job, row, advice)
  local text = almanac.sentences(row)
  if not text then
    return
  end
  local tiers, request = module("tiers"), almanac.request_of_job(job)
  local asked = row.tier and tiers.requested_tier(request, advice.tiers)
  if (not asked or asked.name ~= row.tier) and not (is_slice(row, advice) and not tiers.is_one_gpu(request)) then
    slurm.log_user("%s", "almanac: " .. text)
  end
end

-- module: returns a module by its name. began: os.clock() as the site's line began.
function M.run(job, submit_uid, advice_dir, module, began)
  if is_oversized(job, WAYS) or asks_no_gpu(job) or is_oversized(job, OTHERS) then
    return
  end
  local almanac = module("almanac")
  local gpus = almanac.gpus_of_job(job)
  local uid = is_uid(job.user_id) and job.user_id or submit_uid
  if not gpus or gpus <= 0 or not is_uid(uid) then
    return
  end
  local row, advice, key = look_up(almanac, advice_dir, uid, job, gpus, os.time())
  if not row then
    return
  end
  if advice.mode ~= "off" then
    local done = set_site_factor(job, advice.mode, row.site_factor)
    slurm.log_info(
      "almanac: %s site_factor=%d uid=%d gpus=%d row=%s advice=%s us=%d key=%s",
      done, row.site_factor, uid, gpus, row.kind, advice.version, math.floor((os.clock() - began) * 1e6), key
    )
  end
  if advice.tell then
    tell(module, almanac, job, row, advice)
  end
end

return M
