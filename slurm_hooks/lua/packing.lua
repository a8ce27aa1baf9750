-- packing.lua: a note for an array whose tasks can share a GPU (slurm_hooks/advice/packing_file.py and
-- slurm_hooks/submit/packing_note.py in Lua). `local packing = dofile(".../packing.lua")`. Lua 5.1 to 5.4. It reads and
-- writes nothing; no global is set. No text of a user ever becomes a pattern.

local M = {}

local find, gmatch, match, sub = string.find, string.gmatch, string.match, string.sub

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

-- Whether the value of --array names several tasks that may run together; "1-9%1" is a chain.
function M.is_sweep(array)
  return find(array, "[-,]") ~= nil and sub(array, -2) ~= "%1"
end

-- Whether a request of this family can be told of its row. tiers: the module; all: those of the advice file.
function M.fits(tiers, request, all, row)
  local asked = tiers.requested_tier(request, all)
  if find(request.gpu_type or "", "^%d+g%.") or not tiers.is_one_gpu(request) then
    return false
  end
  return not asked or (asked.compute_slices == nil and asked.capacity_mib >= row.need)
end

return M
