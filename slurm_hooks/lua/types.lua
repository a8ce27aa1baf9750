-- types.lua: which GPU type ends a job first, from the user's run times and the waits now (advisor/decisions/gpu_type.py,
-- almanac/gpu_types.py, and slurm_hooks/submit/type_proposal.py in Lua). `local types = dofile(".../types.lua")`.
-- Lua 5.1 to 5.4. Pure; no global is set. Constraints are hostile: none ever becomes a pattern.

local M = {}

local concat, find, floor, format, gmatch, gsub, match, sub =
  table.concat, string.find, math.floor, string.format, string.gmatch, string.gsub, string.match, string.sub

M.MAX_BYTES = 65536
local NAME = "([A-Za-z0-9._+-]+)"
local KINDS = { constraint = true, gres = true, partition = true }
local SOURCES = { ["own runs"] = true, ["own rates"] = true, ["other families"] = true, ["specifications"] = true }
local MEASURED = "own runs"

-- A number of at most so many digits; nil for any other text.
local function number(text, digits)
  return text and #text <= digits and tonumber(text) or nil
end

-- Lines after the head as a list, without the last one, which names their number; nil where that is wrong.
local function rows_of(text, at)
  local rows = {}
  for line in gmatch(sub(text, at), "([^\n]*)\n") do
    rows[#rows + 1] = line
  end
  local said = number(match(table.remove(rows) or "", "^end\t(%d+)$"), 12)
  return said == #rows and rows or nil
end

local function read_type(row)
  local name, kind, selector = match(row, "^T\t" .. NAME .. "\t(%l+)\t" .. NAME .. "$")
  if name and KINDS[kind] and #name <= 64 and #selector <= 64 then
    return { name = name, kind = kind, [kind] = selector, capacity_mib = 0 }
  end
end

local function read_wait(row)
  local name, gpus, wait, low, high = match(row, "^W\t" .. NAME .. "\t([1-9]%d*)\t(%d+)\t(%d+)\t(%d+)$")
  gpus, wait, low, high = number(gpus, 6), number(wait, 12), number(low, 12), number(high, 12)
  if name and gpus and wait and low and high and low <= wait and wait <= high then
    return { type = name, gpus = gpus, wait = wait, low = low, high = high }
  end
end

-- The waits file: as_of, min_gain, max_age, types (as tiers.lua has tiers), waits. nil where a rule is broken, and where it
-- is too old or of the future.
function M.parse_waits(text, now)
  local head = "^almanac%-waits\t1\nas_of\t(%d+)\nlimits\t([01]%.%d+)\t(%d+)\n()"
  local as_of, gain, age, at = match(text, head)
  as_of, age = number(as_of, 12), number(age, 6)
  if #text > M.MAX_BYTES or sub(text, -1) ~= "\n" or not as_of or not age or #gain > 8 then
    return nil
  end
  local rows = rows_of(text, at)
  if not rows or now < as_of or now - as_of > age then
    return nil
  end
  local found = { as_of = as_of, min_gain = tonumber(gain), max_age = age, types = {}, waits = {}, by_name = {} }
  for _, row in ipairs(rows) do
    local kind = #found.waits == 0 and read_type(row) or nil
    local wait = not kind and read_wait(row) or nil
    if kind and not found.by_name[kind.name] then
      found.by_name[kind.name] = kind
      found.types[#found.types + 1] = kind
    elseif wait and found.by_name[wait.type] then
      found.waits[#found.waits + 1] = wait
    else
      return nil
    end
  end
  return found
end

-- The run times of one family of a user's file, as a list; empty where the file or the family is not there.
function M.parse_times(text, now, key, gpus)
  local expires, at = match(text, "^almanac%-times\t1\nexpires\t(%d+)\n()")
  expires = number(expires, 12)
  local rows = expires and expires > now and #text <= M.MAX_BYTES and sub(text, -1) == "\n" and rows_of(text, at)
  local found = {}
  for _, row in ipairs(rows or {}) do
    local name, count, kind, run, low, high, longest, runs, source =
      match(row, "^R\t([!-~]+)\t([1-9]%d*)\t" .. NAME .. "\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t(%d+)\t([a-z ]+)$")
    run, low, high, longest, runs = number(run, 12), number(low, 12), number(high, 12), number(longest, 12), number(runs, 9)
    local is_read = run and low and high and longest and runs
    if not (name and #name <= 64 and #count <= 6 and #kind <= 64 and is_read and SOURCES[source]) then
      return {}
    elseif name == key and tonumber(count) == gpus then
      found[#found + 1] = {
        type = kind, run = run, low = low, high = high, longest = longest, runs = runs, source = source,
      }
    end
  end
  return found
end

local function split(text, separator)
  local parts = {}
  for part in gmatch(text .. separator, "([^" .. separator .. "]*)[" .. separator .. "]") do
    parts[#parts + 1] = part
  end
  return parts
end

-- Names of the types that a request accepts, in order and as a set; empty: any, or not understood.
function M.asked_types(request, types)
  local named, partitions, list, set = {}, {}, {}, {}
  if not find(request.constraints, "!", 1, true) then
    for feature in gmatch(gsub(request.constraints, "%*%d+", ""), "[^%s&|,*%[%]()!]+") do
      named[feature] = true
    end
  end
  for _, name in ipairs(split(request.partition, ",")) do
    partitions[name] = true
  end
  local function collect(is_asked)
    for _, kind in ipairs(types) do
      if is_asked(kind) and not set[kind.name] then
        set[kind.name] = true
        list[#list + 1] = kind.name
      end
    end
  end
  collect(function(kind)
    return (kind.gres and kind.gres == request.gpu_type) or (kind.constraint and named[kind.constraint]) or false
  end)
  if #list == 0 then
    collect(function(kind) return kind.partition and partitions[kind.partition] or false end)
  end
  table.sort(list)
  return list, set
end

-- The wait of each type for a number of GPUs, of the next larger size in the file.
local function waits_of(waits, gpus)
  local nearest, order = {}, {}
  for _, wait in ipairs(waits.waits) do
    local best = nearest[wait.type]
    if wait.gpus >= gpus and (not best or wait.gpus < best.gpus) then
      if not best then
        order[#order + 1] = wait.type
      end
      nearest[wait.type] = wait
    end
  end
  return nearest, order
end

local function is_before(one, other)
  if one.at ~= other.at then
    return one.at < other.at
  end
  return one.type < other.type
end

-- The best type, the one that it is compared with, and the types that are about as good; nil where there is no advice.
-- limit: the time limit in seconds, or nil.
function M.decide(times, waits, gpus, asked, limit)
  local nearest, order = waits_of(waits, gpus)
  local ends, own = {}, {}
  for _, time in ipairs(times) do
    local wait = nearest[time.type]
    if wait then
      ends[time.type] = {
        type = time.type, at = wait.wait + time.run, low = wait.low + time.low, high = wait.high + time.high,
        time = time, wait = wait,
      }
    end
  end
  local accepted = #asked > 0 and asked or order
  for _, name in ipairs(accepted) do
    own[#own + 1] = ends[name]
  end
  if #own == 0 or #own ~= #accepted then
    return nil
  end
  table.sort(own, function(one, other)
    if one.wait.wait ~= other.wait.wait then
      return one.wait.wait < other.wait.wait
    end
    return is_before(one, other)
  end)
  local current, better = own[1], {}
  for _, each in pairs(ends) do
    local gain = current.at - each.at
    local is_in_time = not limit or each.time.longest <= limit
    if is_in_time and gain > 0 and gain >= waits.min_gain * current.at and each.high < current.low then
      better[#better + 1] = each
    end
  end
  table.sort(better, is_before)
  if not better[1] then
    return nil
  end
  local names = {}
  for _, each in ipairs(better) do
    if each == better[1] or each.at <= better[1].at * (1 + waits.min_gain) then
      names[#names + 1] = each.type
    end
  end
  return better[1], current, names
end

-- round() of Python for numbers of at least 0: to the even one of two equally near.
local function round(x)
  local below = floor(x)
  local part = x - below
  return (part > 0.5 or (part == 0.5 and below % 2 == 1)) and below + 1 or below
end

-- "12 s", "12 min", "3 h 10 min", "2 d 4 h" (almanac/units.py).
function M.duration(seconds)
  local whole = round(seconds)
  if whole < 60 then
    return format("%d s", whole)
  elseif whole < 3600 then
    return format("%d min", round(whole / 60))
  end
  local minutes = round(whole / 60)
  if minutes < 1440 then
    local rest = minutes % 60
    return format("%d h", floor(minutes / 60)) .. (rest > 0 and format(" %d min", rest) or "")
  end
  local hours = round(whole / 3600)
  local rest = hours % 24
  return format("%d d", floor(hours / 24)) .. (rest > 0 and format(" %d h", rest) or "")
end

local function short(seconds)
  return seconds >= 1 and M.duration(round(seconds)) or "none"
end

local function run_text(each)
  local time = each.time
  local runs = time.runs > 0 and format(" (%d %s)", time.runs, time.runs == 1 and "run" or "runs")
    or " (from " .. time.source .. ")"
  return (time.source == MEASURED and "" or "about ") .. short(time.run) .. " on " .. each.type .. runs
end

function M.text(best, current)
  return "Your runs take " .. run_text(best) .. ", " .. run_text(current) .. ". Wait now: " .. short(best.wait.wait)
    .. " and " .. short(current.wait.wait) .. ". " .. best.type .. " ends " .. short(current.at - best.at) .. " earlier."
end

-- Terms of "a|b"; nil for any other expression.
local function alternatives(constraint)
  if find(constraint, "[^A-Za-z0-9_.:+|-]") or not find(constraint, "|", 1, true) then
    return nil
  end
  local terms = split(constraint, "|")
  for _, term in ipairs(terms) do
    if term == "" then
      return nil
    end
  end
  return terms
end

-- The types of a plain "a|b" of a job of several nodes; nil for other requests.
function M.mixed_types(request, types)
  local terms = (request.node_count or 1) >= 2 and alternatives(request.constraints)
  local names = {}
  for _, term in ipairs(terms or {}) do
    for _, kind in ipairs(types) do
      if kind.constraint == term then
        names[#names + 1] = kind.name
      end
    end
  end
  return #names > 1 and names or nil
end

-- Whether the constraint is "a|b" or "[a|b]" of the asked types alone.
local function is_choice(request, waits, asked)
  local bare = gsub(gsub(request.constraints, "^%[", ""), "%]$", "")
  local terms, seen = alternatives(bare), {}
  for _, term in ipairs(terms or {}) do
    seen[term] = true
  end
  local count = 0
  for _ in pairs(seen) do
    count = count + 1
  end
  for _, name in ipairs(asked) do
    local selector = waits.by_name[name].constraint
    if not selector or not seen[selector] then
      return false
    end
  end
  return terms ~= nil and count == #asked
end

-- Option and value that ask for one type; nil and why not.
local function rewrite_one(tiers, request, waits, target)
  local asked = M.asked_types(request, waits.types)
  if #asked > 1 and target.constraint and is_choice(request, waits, asked) then
    return "--constraint", target.constraint
  end
  return tiers.rewrite(request, waits.types, target)
end

-- The same for several types, the best first: `[a|b]`, or a list of partitions, where the request's type stands alone.
function M.rewrite(tiers, request, waits, names)
  local best = waits.by_name[names[1]]
  local option, value = rewrite_one(tiers, request, waits, best)
  local same = {}
  for _, name in ipairs(names) do
    local kind = waits.by_name[name]
    same[#same + 1] = kind and kind.kind == best.kind and kind[kind.kind] or nil
  end
  if not option or #same < 2 or value ~= best[best.kind] then
    return option, value
  elseif option == "--constraint" then
    return option, "[" .. concat(same, "|") .. "]"
  end
  return option, option == "--partition" and concat(same, ",") or value
end

local function names_other_type(request, types)
  for _, kind in ipairs(types) do
    if request.gpu_type == "" or kind.gres == request.gpu_type then
      return false
    end
  end
  return request.gpu_type ~= ""
end

-- A proposal as proposal.lua has it, with said (the whole message), choice_key, check_option and check_value (the plain
-- change whose nodes are looked for); nil where there is nothing to say. tiers: the module; key: of the job's name.
function M.propose(tiers, request, times, waits, key)
  local found = { key = key, gpus = request.gpu_count, choice_key = sub("?" .. key, 1, 64), request = request }
  local mixed = M.mixed_types(request, waits.types)
  if mixed then
    found.tier = waits.by_name[mixed[1]]
    found.said = format('-C "%s" with %d nodes can give one job nodes of both %s and %s; in brackets, all nodes are of '
      .. "one type.", request.constraints, request.node_count, mixed[1], mixed[2])
    found.option, found.value = "--constraint", "[" .. request.constraints .. "]"
    found.check_option, found.check_value = "--constraint", found.tier.constraint
  elseif not names_other_type(request, waits.types) then
    local asked = M.asked_types(request, waits.types)
    local best, current, names = M.decide(times, waits, request.gpu_count, asked, request.time_limit_s)
    if not best then
      return nil
    end
    found.tier, found.said = waits.by_name[best.type], M.text(best, current)
    found.option, found.value = M.rewrite(tiers, request, waits, names)
    found.check_option, found.check_value = rewrite_one(tiers, request, waits, found.tier)
    found.value, found.check_value = found.option and found.value, found.check_option and found.check_value
  else
    return nil
  end
  if request.is_placed then
    found.option, found.value = nil, nil
  end
  return found
end

return M
