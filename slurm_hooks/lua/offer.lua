-- offer.lua: whether nodes exist that meet a rewritten submission as a whole (slurm_hooks/submit/offer.py in Lua).
-- `local offer = dofile(".../offer.lua")`. Lua 5.1 to 5.4. It reads and writes nothing; no global is set.

local M = {}

local ceil, find, gmatch, gsub, match, max, sub =
  math.ceil, string.find, string.gmatch, string.gsub, string.match, math.max, string.sub

M.MAX_BYTES = 262144
M.MAX_AGE_S = 300
M.SLICE_AGE_S = 30 -- before a change to a MIG slice: a layout can change
M.FORMAT = "%P|%D|%c|%m|%f|%G|%l|%a|%g"
local ROW = "^([^|]*)|(%d+)|(%d+)|(%d+)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)$"
local MIB = { K = 1 / 1024, [""] = 1, M = 1, G = 1024, T = 1048576 }

-- A count that was asked for; nil for every way to say that none was.
local function number(text)
  local count = tonumber(match(text or "", "^%d+$"))
  return count and count >= 1 and count < 65534 and count or nil
end

-- MiB of "4G", "500" or "0"; 0 where nothing is asked, nil where it cannot be read.
local function memory(text)
  local count, unit = match(text or "0", "^(%d+)([KMGTkmgt]?)[Bb]?%??$")
  return count and #count <= 12 and ceil(tonumber(count) * MIB[string.upper(unit)]) or nil
end

-- An option that names GPUs alone, as GRES: "gpu:a100:4" of "a100:4".
local function spelled(text)
  return (gsub(text or "", "[^,]+", "gpu:%0"))
end

-- GPUs that one node needs for so many tasks, at least 1; nil where that cannot be read.
local function gpus_per_node(options, tasks, parse_gpus)
  local by_node, by_gres = parse_gpus(spelled(options["gpus-per-node"])), parse_gpus(options["gres"] or "")
  local by_task, by_tres = parse_gpus(spelled(options["gpus-per-task"])), parse_gpus(options["tres-per-task"] or "")
  return by_node and by_gres and by_task and by_tres and max(by_node, by_gres, by_task * tasks, by_tres * tasks, 1)
end

-- The least and the greatest number of nodes, 0 where it is not given; nil where the text cannot be read. "1-0" is what
-- cli_filter gets where the user names none.
local function node_span(text)
  if text == "" or text == "1-0" then
    return 0, 0
  end
  local low, rest = match(text, "^(%d+)(.*)$")
  local high = match(rest or "x", "^%-(%d+)$") or match(rest or "x", "^%-(%d+)[,:]")
  if not number(low) or not (rest == "" or high or match(rest, "^[,:]")) then
    return nil
  end
  return tonumber(low), tonumber(high or rest == "" and low or 0)
end

-- Seconds of "[D-]HH:MM:SS" as cli_filter and sinfo write it; nil for none, "infinite", and Slurm's NO_VAL minutes.
local function seconds(text)
  local days, clock = match(text or "", "^(%d+)%-(.*)$")
  local hours, minutes, rest = match(clock or text or "", "^(%d+):(%d+):(%d+)$")
  if not hours and not days then
    hours, minutes, rest = "0", match(text or "", "^(%d+):(%d+)$")
  end
  local total = minutes and (tonumber(days) or 0) * 86400 + hours * 3600 + minutes * 60 + rest
  return total and total < 257698037640 and total or nil
end

M.seconds = seconds

-- What a submission asks of its nodes, at least: nodes, gpus (of all), and per node gpus_per_node, cpus and memory_mib;
-- time_limit_s, nil where it names none. nil where an option cannot be read. options: texts by name; gpus: of the job;
-- parse_gpus: that of almanac.lua.
function M.needs_of(options, gpus, parse_gpus)
  local mem, per_cpu, per_gpu = memory(options["mem"]), memory(options["mem-per-cpu"]), memory(options["mem-per-gpu"])
  local tasks, per_node = number(options["ntasks"]), number(options["ntasks-per-node"])
  local nodes, most_nodes = node_span(options["nodes"] or "")
  local each = gpus_per_node(options, per_node or 1, parse_gpus)
  if not (mem and per_cpu and per_gpu and each and nodes) then
    return nil
  elseif nodes == 0 then
    nodes = tasks and per_node and ceil(tasks / per_node) or 1
  end
  if most_nodes > 0 then
    each = max(each, ceil(gpus / most_nodes))
  end
  local here = per_node or ceil((tasks or nodes) / nodes)
  local cpus = max(
    here * (number(options["cpus-per-task"]) or 1), number(options["mincpus"]) or 1,
    each * (number(options["cpus-per-gpu"]) or 1)
  )
  return {
    nodes = nodes, gpus = gpus, gpus_per_node = each, cpus = cpus,
    memory_mib = max(mem, per_cpu * cpus, per_gpu * each), time_limit_s = seconds(options["time"]),
  }
end

-- GPUs of a node's GRES, "gpu:a100:4(S:0-1),nvme:1", of one type where one is named.
local function gpus_of(gres, kind)
  local total = 0
  for term in gmatch(gsub(gres, "%([^)]*%)", ""), "[^,]+") do
    local named, count = match(term, "^gpu:([^:]+):(%d+)$")
    count = count or match(term, "^gpu:(%d+)$")
    if count and (kind == "" or named == kind) then
      total = total + tonumber(count)
    end
  end
  return total
end

local function has_all(features, wanted)
  local all = "," .. features .. ","
  for _, feature in ipairs(wanted) do
    if not find(all, "," .. feature .. ",", 1, true) then
      return false
    end
  end
  return true
end

-- Whether a partition that the submission did not name would take it.
local function is_open(row, needs)
  local limit_s = seconds(row.limit)
  local is_too_long = limit_s and needs.time_limit_s and needs.time_limit_s > limit_s
  return row.state == "up" and row.groups == "all" and not is_too_long
end

-- Whether one partition's rows hold the needs.
local function holds(rows, wanted, needs)
  local nodes, gpus = 0, 0
  for _, row in ipairs(rows) do
    local here = gpus_of(row.gres, wanted.gpu_type)
    if here >= needs.gpus_per_node and row.cpus >= needs.cpus and row.memory_mib >= needs.memory_mib
      and has_all(row.features, wanted.features) and (not wanted.is_moved or is_open(row, needs)) then
      nodes, gpus = nodes + row.nodes, gpus + row.nodes * here
    end
  end
  return nodes >= needs.nodes and gpus >= needs.gpus
end

local function rows_of(listing, partition)
  local rows = {}
  for line in gmatch(listing, "[^\n]+") do
    local name, nodes, cpus, memory_mib, features, gres, limit, state, groups = match(line, ROW)
    if name and (name == partition or name == partition .. "*" or (partition == "" and sub(name, -1) == "*")) then
      rows[#rows + 1] = {
        nodes = tonumber(nodes), cpus = tonumber(cpus), memory_mib = tonumber(memory_mib), features = features,
        gres = gres, limit = limit, state = state, groups = groups,
      }
    end
  end
  return rows
end

-- true, false, or nil where it is not known. listing: what `sinfo -a -e -h -o FORMAT` said. wanted: partition ("": the
-- default one; of several each has to hold the needs), features, gpu_type ("": any) and is_moved. needs: of M.needs_of().
function M.is_offered(listing, wanted, needs)
  if not needs or not wanted.features or not match(listing, "^[^|\n]*|%d+|%d+|") then
    return nil
  end
  for name in gmatch(wanted.partition .. ",", "([^,]*),") do
    if not holds(rows_of(listing, name), wanted, needs) then
      return false
    end
  end
  return true
end

-- Features that an expression joined by "&" needs, as a list; nil for any other expression.
local function plain(constraint)
  if find(constraint, "[^A-Za-z0-9_.:+&,-]") then
    return nil
  end
  local features = {}
  for feature in gmatch(constraint, "[^&,]+") do
    features[#features + 1] = feature
  end
  return features
end

local NAMES_GPUS = { ["--gres"] = true, ["--gpus"] = true, ["--gpus-per-node"] = true, ["--gpus-per-task"] = true }

-- What a request asks for once one option of it is changed, as is_offered() takes it.
function M.wanted(request, option, value, tier)
  local constraint = option == "--constraint" and value or request.constraints
  return {
    partition = option == "--partition" and value or request.partition, features = plain(constraint),
    gpu_type = NAMES_GPUS[option] and tier.gres or request.gpu_type, is_moved = option == "--partition",
  }
end

-- Kept listings: a line that names time, host and Slurm's configuration, then what sinfo said.
local function head(now, place)
  return "almanac-nodes\t1\t" .. string.format("%.0f", now) .. "\t" .. gsub(place, "[^!-~]", "?") .. "\n"
end

-- max_age: seconds; nil for MAX_AGE_S.
function M.kept(text, now, place, max_age)
  local time = tonumber(match(text, "^almanac%-nodes\t1\t(%d+)\t"))
  local start = time and now >= time and now - time < (max_age or M.MAX_AGE_S) and head(time, place)
  return start and sub(text, 1, #start) == start and sub(text, #start + 1) or nil
end

function M.to_keep(listing, now, place)
  return head(now, place) .. listing
end

return M
