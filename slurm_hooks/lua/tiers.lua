-- tiers.lua: the memory tier that a request names (almanac/tiers.py in Lua). `local tiers = dofile(".../tiers.lua")`.
-- Lua 5.1 to 5.4. Pure; no global is set.
-- request: constraints, gpu_type and partition, "" where nothing is asked; gpu_count and may_use_more as almanac.lua has
-- them. A tier: as the advice file has it.

local M = {}

local find, gmatch, gsub = string.find, string.gmatch, string.gsub
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

-- Whether the job surely uses one GPU on one node. Only such a job can use a MIG slice.
function M.is_one_gpu(request)
  return request.gpu_count == 1 and not request.may_use_more
end

return M
