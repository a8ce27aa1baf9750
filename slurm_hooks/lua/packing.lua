-- packing.lua: a note for an array whose tasks can share a GPU (slurm_hooks/advice/packing_file.py and
-- slurm_hooks/submit/packing_note.py in Lua). `local packing = dofile(".../packing.lua")`. Lua 5.1 to 5.4. It reads and
-- writes nothing; no global is set. No text of a user ever becomes a pattern.

local M = {}

local find, gmatch, lower, match, sub = string.find, string.gmatch, string.lower, string.match, string.sub

M.MAX_BYTES = 65536
M.PROGRAM = "almanac-pack"
M.AGAIN_S = 86400

-- The row of one family of a user's file, with need (MiB) and text; nil where the file or the family is not there.
function M.parse(text, now, key, gpus)
  local expires, at = match(text, "^almanac%-packing\t1\nexpires\t(%d+)\n()")
  if not expires or #expires > 12 or tonumber(expires) <= now or #text > M.MAX_BYTES or sub(text, -1) ~= "\n" then
    return nil
  end
  local found, count, said
  count = 0
  for line in gmatch(sub(text, at), "([^\n]*)\n") do
    local name, size, need, note = match(line, "^P\t([!-~]+)\t([1-9]%d*)\t(%d+)\t([ -~]+)$")
    if said then
      return nil
    elseif name and #name <= 64 and #size <= 6 and #need <= 12 and #note <= 400 then
      count = count + 1
      if not found and name == key and tonumber(size) == gpus then
        found = { key = name, gpus = gpus, need = tonumber(need), text = note }
      end
    else
      said = match(line, "^end\t(%d+)$")
      if not said or #said > 12 then
        return nil
      end
    end
  end
  return said and tonumber(said) == count and found or nil
end

-- Whether the value of --array is one range without a step, with several tasks that may run together. almanac-pack needs
-- a step instead, which a list such as "1,5" cannot have. "1-9%1" is a chain.
function M.is_sweep(array)
  local first, last, rest = match(array, "^(%d+)%-(%d+)(.*)$")
  if not first or #first > 9 or #last > 9 or tonumber(first) >= tonumber(last) then
    return false
  end
  local limit = match(rest, "^:1%%(%d+)$") or match(rest, "^%%(%d+)$")
  if limit then
    return #limit <= 9 and tonumber(limit) > 1
  end
  return rest == "" or rest == ":1"
end

-- Whether a job of this family gets a whole GPU with memory for two, whichever one Slurm gives it. One that names no
-- tier, or a choice, may get the smallest. A GPU type that is no tier may be any model. tiers: the module; all: those of
-- the advice file.
function M.fits(tiers, request, all, row)
  local asked, gpu_type = tiers.requested_tier(request, all), request.gpu_type or ""
  if not tiers.is_one_gpu(request) or find(lower(gpu_type), "[1-7]g%.%d+gb") or (gpu_type ~= "" and not asked) then
    return false
  elseif asked then
    return not asked.compute_slices and asked.capacity_mib >= row.need
  end
  for _, tier in ipairs(all) do
    if not tier.compute_slices and tier.capacity_mib < row.need then
      return false
    end
  end
  return true
end

return M
