-- tiers.lua: which memory tier a request names, and how to rewrite the request for another (almanac/tiers.py in Lua).
-- `local tiers = dofile(".../tiers.lua")`. Lua 5.1 to 5.4. Pure; no global is set.
-- request: constraints, gres, gpu_type and partition, "" where nothing is asked; gpu_options, gpu_count and may_use_more
-- as almanac.lua has them. A tier: as the advice file has it.

local M = {}

local concat, find, gmatch, gsub, match = table.concat, string.find, string.gmatch, string.gsub, string.match
local lower, sub = string.lower, string.sub
local OPERATORS = "[&|,%[%]()]"

local function split(text)
  local parts = {}
  for part in gmatch(text .. ",", "([^,]*),") do
    parts[#parts + 1] = part
  end
  return parts
end

-- The features that an expression names, as a set.
local function features(constraint)
  local found = {}
  for feature in gmatch(gsub(constraint, "%*%d+", ""), "[^%s&|,*%[%]()!]+") do
    found[feature] = true
  end
  return found
end

local function common(sets)
  local found = {}
  for feature in pairs(sets[1]) do
    found[feature] = true
    for _, other in ipairs(sets) do
      found[feature] = found[feature] and other[feature]
    end
  end
  return found
end

-- The features that every way to meet an expression has, as a set; empty where it is not understood.
function M.required_features(constraint)
  local bare, count = gsub(constraint, "%*%d+", ""), 0
  local stack = { { {} } }
  if find(bare, "[!*]") then
    return {}
  end
  for token in gmatch(gsub(bare, OPERATORS, " %0 "), "%S+") do
    local top = stack[#stack]
    count = count + 1
    if count > 1000 or ((token == ")" or token == "]") and #stack == 1) then
      return {}
    elseif token == "(" or token == "[" then
      stack[#stack + 1] = { {} }
    elseif token == ")" or token == "]" then
      local outer = stack[#stack - 1]
      for feature in pairs(common(top)) do
        outer[#outer][feature] = true
      end
      stack[#stack] = nil
    elseif token == "|" then
      top[#top + 1] = {}
    elseif token ~= "&" and token ~= "," then
      top[#top][token] = true
    end
  end
  return #stack == 1 and common(stack[1]) or {}
end

local function names(request, tier)
  if tier.constraint then
    return features(request.constraints)[tier.constraint] or false
  elseif tier.gres then
    return tier.gres == request.gpu_type
  end
  for _, partition in ipairs(split(request.partition)) do
    if partition == tier.partition then
      return true
    end
  end
  return false
end

-- The one tier that a request asks for; nil where it names none, or leaves a choice.
function M.requested_tier(request, tiers)
  local named
  for _, tier in ipairs(tiers) do
    if names(request, tier) then
      if named then
        return nil
      end
      named = tier
    end
  end
  if named and named.constraint and not M.required_features(request.constraints)[named.constraint] then
    return nil
  end
  return named
end

-- Whether the request names a tier at all, a choice between several included.
function M.names_any_tier(request, tiers)
  for _, tier in ipairs(tiers) do
    if names(request, tier) then
      return true
    end
  end
  return false
end

local function selectors(tiers, kind)
  local known = {}
  for _, tier in ipairs(tiers) do
    if tier[kind] then
      known[tier[kind]] = true
    end
  end
  return known
end

local function without_ends(one, other)
  while one ~= "" and sub(one, 1, 1) == sub(other, 1, 1) do
    one, other = sub(one, 2), sub(other, 2)
  end
  while one ~= "" and sub(one, -1) == sub(other, -1) do
    one, other = sub(one, 1, -2), sub(other, 1, -2)
  end
  return one, other
end

-- Whether a feature looks like a misspelled tier: other digits or case, or one letter more, fewer or other.
local function is_like(term, name)
  local one, other = lower(term), lower(name)
  if gsub(one, "%d+", "#") == gsub(other, "%d+", "#") then
    return true
  end
  one, other = without_ends(one, other)
  return #one <= 1 and #other <= 1
end

-- The first feature that looks like a tier's, and that; nil where none does.
local function misspelled(terms, tiers)
  local names = {}
  for name in pairs(selectors(tiers, "constraint")) do
    names[#names + 1] = name
  end
  table.sort(names)
  for _, term in ipairs(terms) do
    for _, name in ipairs(names) do
      if is_like(term, name) then
        return term, name
      end
    end
  end
end

local function rewrite_constraint(constraint, tiers, target)
  if constraint == "" then
    return "--constraint", target.constraint
  end
  local joined = gsub(constraint, ",", "&")
  if find(joined, "[^A-Za-z0-9_.:+&-]") or find("&" .. joined .. "&", "&&", 1, true) then
    return nil, 'the constraint "' .. constraint .. '" is more than a list joined by "&"'
  end
  local known, terms, asked, count = selectors(tiers, "constraint"), {}, {}, 0
  for term in gmatch(joined, "[^&]+") do
    count = count + (known[term] and 1 or 0)
    asked[#asked + 1] = term
    terms[#terms + 1] = known[term] and target.constraint or term
  end
  if count > 1 then
    return nil, 'the constraint "' .. constraint .. '" names several tiers'
  end
  local term, name = misspelled(count == 0 and asked or {}, tiers)
  if term then
    return nil, 'the constraint names "' .. term .. '", perhaps a misspelled ' .. name
  end
  if count == 0 then
    terms[#terms + 1] = target.constraint
  end
  return "--constraint", concat(terms, "&")
end

local REWRITABLE = { ["--gres"] = true, ["--gpus"] = true, ["--gpus-per-node"] = true, ["--gpus-per-task"] = true }
local TYPE = "[A-Za-z0-9_.+-]+"

local function is_gpu_term(term)
  return term == "gpu" or find(term, "^gpu:")
end

-- The option's text with this type; nil where it is not one term of GPUs.
local function retyped(option, text, gres_type)
  if option ~= "--gres" then
    local prefix, rest = match(text, "^(gpu:)(.*)$")
    rest = rest or text
    local count = match(rest, "^(%d+)$") or match(rest, "^" .. TYPE .. ":(%d+)$")
    return count and (prefix or "") .. gres_type .. ":" .. count
  end
  local terms, place = split(text), nil
  for index, term in ipairs(terms) do
    if is_gpu_term(term) then
      if place then
        return nil
      end
      place = index
    end
  end
  if not place or find(text, "(", 1, true) then
    return nil
  end
  terms[place] = "gpu:" .. gres_type .. ":" .. (match(terms[place], ":(%d+)$") or "1")
  return concat(terms, ",")
end

-- The options that name GPUs, with their texts.
local function gpu_asks(request)
  local asks = {}
  for _, term in ipairs(split(request.gres)) do
    if is_gpu_term(term) then
      asks[1] = { option = "--gres", text = request.gres }
    end
  end
  for _, ask in ipairs(request.gpu_options or {}) do
    asks[#asks + 1] = ask
  end
  return asks
end

-- Whether the job surely uses one GPU on one node. Only such a job can use a MIG slice.
function M.is_one_gpu(request)
  return request.gpu_count == 1 and not request.may_use_more
end

-- The option that names the GPUs is the one that is rewritten. Slurm has no rule for two that disagree.
local function rewrite_gres(request, tiers, target)
  if target.compute_slices and not M.is_one_gpu(request) then
    return nil, "a MIG slice is for jobs of one GPU on one node"
  end
  local asks = gpu_asks(request)
  if #asks > 1 then
    local named = {}
    for index, ask in ipairs(asks) do
      named[index] = ask.option
    end
    return nil, "the request names its GPUs by " .. concat(named, " and ")
  end
  local ask = asks[1] or { option = "--gres", text = "" }
  if not REWRITABLE[ask.option] then
    return nil, "almanac does not change " .. ask.option
  end
  local changed = retyped(ask.option, ask.text, target.gres)
  if not changed or (request.gpu_type ~= "" and not selectors(tiers, "gres")[request.gpu_type]) then
    return nil, "the request does not name its GPUs by one term of a known type"
  end
  return ask.option, changed
end

-- Whether one tier is smaller than another: in memory, then in compute. A whole GPU has more compute than any slice.
function M.is_smaller(one, other)
  if one.capacity_mib ~= other.capacity_mib then
    return one.capacity_mib < other.capacity_mib
  end
  return (one.compute_slices or 8) < (other.compute_slices or 8)
end

-- How to ask for the target tier instead, every other term kept: option and value; or nil and why not.
function M.rewrite(request, tiers, target)
  for _, tier in ipairs(tiers) do
    if tier.kind ~= target.kind and names(request, tier) then
      local word = tier.kind == "gres" and "GRES type" or tier.kind
      return nil, "the request names " .. tier.name .. " by its " .. word
    end
  end
  if target.partition and request.partition ~= "" and not selectors(tiers, "partition")[request.partition] then
    return nil, "the request names the partition " .. request.partition
  end
  if not target.gres and request.gpu_type ~= "" and not M.requested_tier(request, tiers) then
    return nil, "the request names the GPU type " .. request.gpu_type
  end
  if target.constraint then
    return rewrite_constraint(request.constraints, tiers, target)
  elseif target.gres then
    return rewrite_gres(request, tiers, target)
  elseif find(request.partition, ",", 1, true) then
    return nil, "the request names several partitions (" .. request.partition .. ")"
  end
  return "--partition", target.partition
end

return M
