-- proposal.lua: the message and the question at a terminal (slurm_hooks/submit/proposal.py and choices.py in Lua).
-- `local proposal = dofile(".../proposal.lua")`. Lua 5.1 to 5.4. It reads and writes nothing; no global is set.

local M = {}

local concat, find, format, gmatch, gsub, match, sub =
  table.concat, string.find, string.format, string.gmatch, string.gsub, string.match, string.sub

local COLUMNS = 80
local HEAD, INDENT = "almanac: ", "         "
local SHORT = { ["--constraint"] = "-C", ["--partition"] = "-p" }
local MEANINGS = { y = "yes", yes = "yes", a = "always", always = "always", v = "never", never = "never" }
local MAX_BYTES = 65536
local ASK_AGAIN_S = 3600
local CHOICE = "^([!-~]+)\t([1-9]%d*)\t(%l+)\t([ -~]+)\t(%d+)$"
local WORDS = { asked = true, always = true, never = true }

local function tier_named(advice, name)
  for _, tier in ipairs(advice.tiers) do
    if tier.name == name then
      return tier
    end
  end
end

-- Another tier for a submission: key, gpus, row, tier, request, asked (the tier that it names, nil: none), and option and
-- value to ask for it, nil where that cannot be rewritten. nil where there is nothing to say. request, key: as of
-- almanac.lua; tiers: the module.
function M.propose(tiers, request, row, advice)
  local tier = row and row.kind == "F" and row.text and tier_named(advice, row.tier)
  if not tier then
    return nil
  end
  local asked = tiers.requested_tier(request, advice.tiers)
  if not asked and tiers.names_any_tier(request, advice.tiers) then
    return nil
  end
  if asked and not tiers.is_smaller(asked, tier) and not tiers.is_smaller(tier, asked) then
    return nil
  elseif tier.compute_slices and not tiers.is_one_gpu(request) then
    return nil
  end
  local is_larger = asked and tiers.is_smaller(asked, tier)
  local found = { key = row.key, gpus = row.gpus, row = row, tier = tier, asked = asked, request = request,
    is_larger = is_larger }
  if not request.is_placed and (not asked or asked.kind == tier.kind) then
    found.option, found.value = tiers.rewrite(request, advice.tiers, tier)
    found.value = found.option and found.value
  end
  return found
end

-- "nothing", "tell", "ask", "change" or "change and say". mode: off, show, ask or apply.
function M.action(mode, found, choice, now)
  local word = choice and choice.word
  local is_recent = choice and now - choice.time >= 0 and now - choice.time < ASK_AGAIN_S
  local is_always = word == "always" and choice.tier == found.tier.name
  if mode == "off" or word == "never" then
    return "nothing"
  elseif mode == "apply" then
    return found.value and "change" or "nothing"
  elseif mode == "ask" and is_always then
    return found.value and "change and say" or "nothing"
  elseif is_recent and (word == "asked" or is_always) then
    return "nothing"
  end
  return mode == "ask" and found.value and "ask" or "tell"
end

-- What a line typed at the question means: yes, no, always or never.
function M.answer(line)
  return MEANINGS[string.lower(match(line or "", "^%s*(.-)%s*$"))] or "no"
end

-- Lines of at most COLUMNS, unless a word is longer. Byte 1, which no text has, keeps a number on one line with its unit.
local function wrapped(text, head)
  local lines, line = {}, head
  for word in gmatch(gsub(text, "(%d) (%a)", "%1\1%2"), "%S+") do
    if line == head or line == INDENT then
      line = line .. word
    elseif #line + 1 + #word > COLUMNS then
      lines[#lines + 1] = line
      line = INDENT .. word
    else
      line = line .. " " .. word
    end
  end
  lines[#lines + 1] = line
  return (gsub(concat(lines, "\n") .. "\n", "\1", " "))
end

-- Takes the change (option and value) out of the proposal unless nodes would take the changed request.
-- is_offered: true, false, or nil: not known.
function M.checked(found, is_offered)
  if found.value and not is_offered then
    local nodes = is_offered == false and "found no nodes for this job" or "could not check for nodes"
    found.not_offered = "almanac " .. nodes .. " with " .. M.typed(found)
    found.option, found.value = nil, nil
  end
end

-- A note on packing: a sentence, and what to use on a line of its own.
function M.note(text)
  local at = find(text, " Use: ", 1, true)
  return wrapped(sub(text, 1, (at or 0) - 1), HEAD) .. (at and wrapped(sub(text, at), INDENT) or "")
end

-- The tier, the evidence, the expected waits, and why the change is not offered.
-- The reader of the advice file lets only printable ASCII pass.
function M.message(found)
  local too_small = found.is_larger and found.asked.name .. " is too small, " or ""
  local said = wrapped(found.said or too_small .. found.tier.name .. " is enough: " .. found.row.text, HEAD)
  if found.row and found.row.waits then
    local waits = gsub(gsub(found.row.waits, "([^;=]*)=", "%1 "), ";", ", ")
    said = said .. wrapped("Expected wait: " .. waits .. ".", INDENT)
  end
  if found.not_offered then
    said = said .. wrapped("No change: " .. found.not_offered .. ".", INDENT)
  end
  return said
end

-- The option as it can be typed in a shell: -C "gpu&hbm40g".
function M.typed(found)
  local value = sub(gsub(found.value, "[^ -~]", "?"), 1, 1000)
  local quoted = find(value, "[^A-Za-z0-9_.:,+&|=-]") and "'" .. gsub(value, "'", "'\\''") .. "'" or '"' .. value .. '"'
  local name = SHORT[found.option]
  return name and name .. " " .. quoted or found.option .. "=" .. quoted
end

-- The question in two lines; the cursor stays on the second.
function M.question(found)
  return wrapped("Submit with " .. M.typed(found) .. " instead?", INDENT)
    .. INDENT .. "[y]es, [N]o, [a]lways, or ne[v]er for this job: "
end

function M.always_said(found)
  return wrapped("using " .. M.typed(found) .. ': you answered "always" for ' .. found.key .. ".", HEAD)
end

-- The answers of a choices file as a list; empty where any line breaks the format.
function M.parse_choices(text)
  local choices, seen = {}, {}
  if #text > MAX_BYTES or (text ~= "" and sub(text, -1) ~= "\n") then
    return {}
  end
  for line in gmatch(text, "([^\n]*)\n") do
    local key, gpus, word, tier, time = match(line, CHOICE)
    if not (key and #key <= 64 and #gpus <= 6 and WORDS[word] and #tier <= 100 and #time <= 12) then
      return {}
    end
    if not seen[key .. "\t" .. gpus] then
      seen[key .. "\t" .. gpus] = true
      choices[#choices + 1] = { key = key, gpus = tonumber(gpus), word = word, tier = tier, time = tonumber(time) }
    end
  end
  return choices
end

function M.find_choice(choices, key, gpus)
  for _, choice in ipairs(choices) do
    if choice.key == key and choice.gpus == gpus then
      return choice
    end
  end
end

local function written(choice)
  return format("%s\t%d\t%s\t%s\t%.0f\n", choice.key, choice.gpus, choice.word, choice.tier, choice.time)
end

-- The file's text with the new answer first; questions of over an hour ago and the last lines of too many go.
-- kept: seconds in place of an hour.
function M.choices_text(choices, new, kept)
  local lines = { written(new) }
  local room = MAX_BYTES - #lines[1]
  for _, choice in ipairs(choices) do
    local age = new.time - choice.time
    local is_same = choice.key == new.key and choice.gpus == new.gpus
    if not is_same and (choice.word ~= "asked" or (age >= 0 and age < (kept or ASK_AGAIN_S))) then
      local line = written(choice)
      room = room - #line
      if room < 0 then
        break
      end
      lines[#lines + 1] = line
    end
  end
  return concat(lines)
end

-- The choice to keep after an answer. word: from M.answer(); nil where the user was not asked.
function M.new_choice(found, earlier, word, now)
  local lasting = (word == "always" or word == "never") and word or "asked"
  local tier = found.tier.name
  if not word and earlier and earlier.word == "always" then
    lasting, tier = "always", earlier.tier
  end
  return { key = found.choice_key or found.key, gpus = found.gpus, word = lasting, tier = tier, time = now }
end

return M
