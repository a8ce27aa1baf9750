-- almanac.lua: advice files, name keys, and GPU requests for job_submit.lua. Lua 5.1 to 5.4.
-- `local almanac = dofile(".../almanac.lua")`. It reads one file and does nothing else; no global is set.
-- It follows slurm_hooks/advice/file.py, almanac/names.py, and almanac/tres.py: the tests give them the same examples.
-- Tiers are in tiers.lua. Job names and constraints are hostile: none ever becomes a pattern.

local M = {}

local byte, find, format, gmatch = string.byte, string.find, string.format, string.gmatch
local gsub, match, sub = string.gsub, string.match, string.sub
local floor, log, max, min = math.floor, math.log, math.max, math.min
local concat = table.concat

-- Advice files (slurm_hooks/advice/file.py):

local MAX_BYTES = 65536
local MODES = { off = true, observe = true, apply = true }
local TELLS = { yes = true, no = false }
local PROMPTS = { off = true, show = true, ask = true }
local HEAD = "^almanac%-advice\t([12])\nversion\t([0-9A-Za-z.-]+)\nwritten\t(%d+)\nexpires\t(%d+)\nmode\t(%l+)\ntell\t(%l+)"
  .. "\nprompt\t(%l+)\npriority\t([%d.]+)\t([%d.]+)\t([%d.]+)\n()"
-- Of format 1, and of format 2: with compute slices, 0 for a whole GPU.
local TIERS = {
  ["1"] = "^tier\t([ -~]+)\t(%d+)\t(%l+)\t([ -~]+)()\n()",
  ["2"] = "^tier\t([ -~]+)\t(%d+)\t(%l+)\t([ -~]+)\t([0-7])\n()",
}
local TIER_KINDS = { constraint = true, gres = true, partition = true }
-- Rows by their first byte. Captured: where key, GPU count, predicted seconds, and site factor end; the bound; the next line.
local FAMILY, GPUS, USER = 70, 71, 85
local ROWS = {
  [FAMILY] = "^F\t[!-~]+()\t[1-9]%d*()\t%d+()\t%d+()\t([%d-]+)\t[ -~]+\t[ -~]+\t[ -~]+\n()",
  [GPUS] = "^G\t%-()\t[1-9]%d*()\t%d+()\t%d+()\t(%-)\t%-\t%-\t%-\n()",
  [USER] = "^U\t%-()\t%-()\t%d+()\t%d+()\t(%-)\t%-\t%-\t%-\n()",
}
local FIELDS = "^%u\t([^\t]+)\t[^\t]+\t(%d+)\t(%d+)\t([^\t]+)\t([^\t]+)\t([^\t]+)\t([^\n]+)"

local function decimal(text)
  local whole, part = match(text, "^(%d+)%.?(%d*)$")
  if whole and #whole <= 12 and #part <= 6 and (part ~= "" or whole == text) then
    return tonumber(text)
  end
end

local function read_head(text, now)
  local file_format, version, written, expires, mode, tell, prompt, k, least, greatest, at = match(text, HEAD)
  if not version or #version > 64 or #written > 12 or #expires > 12 or tonumber(expires) <= now then
    return nil
  end
  if tonumber(written) > now + 300 then  -- by a clock that was ahead: it would be believed for as long
    return nil
  end
  k, least, greatest = decimal(k), decimal(least), decimal(greatest)
  if not (MODES[mode] and TELLS[tell] ~= nil and PROMPTS[prompt] and k and least and greatest) then
    return nil
  end
  if k <= 0 or least <= 0 or least >= greatest then
    return nil
  end
  return {
    format = file_format, version = version, written = tonumber(written), expires = tonumber(expires),
    mode = mode, tell = TELLS[tell], prompt = prompt,
    priority = { k = k, min = least, max = greatest }, tiers = {}, text = text,
  }, at
end

-- The tier at a place of the text, and where the next line begins; nil where it is none.
local function read_tier(text, at, file_format)
  local name, capacity, kind, selector, slices, next_at = match(text, TIERS[file_format], at)
  if name and #capacity <= 12 and TIER_KINDS[kind] then
    slices = file_format == "2" and tonumber(slices) or 0
    local tier = { name = name, capacity_mib = tonumber(capacity), kind = kind, [kind] = selector }
    tier.compute_slices = slices > 0 and slices or nil
    return tier, next_at
  end
end

-- Position of the line after a row; nil if this is no row.
local function after_row(text, at, kind)
  local key, gpus, predicted, factor, bound, next_at = match(text, ROWS[kind], at)
  if key and key - at <= 66 and gpus - key <= 7 and predicted - gpus <= 13 and factor - predicted <= 10 then
    if bound == "-" or (#bound <= 12 and not find(bound, "-", 1, true)) then
      return next_at
    end
  end
end

-- Tiers, then rows F, G and U in this order, then their number. Rows are only checked; row_of() finds one in the text.
local function read_lines(advice, text, at)
  local kind, last, count = byte(text, at), 0, 0
  while kind == 116 do -- "t"
    local tier
    tier, at = read_tier(text, at, advice.format)
    if not tier then
      return nil
    end
    advice.tiers[#advice.tiers + 1] = tier
    kind = byte(text, at)
  end
  while ROWS[kind] and kind >= last do
    at = after_row(text, at, kind)
    if not at then
      return nil
    end
    last, count, kind = kind, count + 1, byte(text, at)
  end
  local said = match(text, "^end\t(%d+)\n$", at)
  return said and #said <= 12 and tonumber(said) == count and advice or nil
end

-- A file's text in one read; nil where it is absent, too large, a directory, or no longer as long as it was.
local function slurp(path)
  local file = io.open(path, "rb")
  if not file then
    return nil
  end
  local size = file:seek("end")
  local text = size and size <= MAX_BYTES and file:seek("set") and file:read(MAX_BYTES)
  file:close()
  return text and #text == size and text or nil
end

-- The advice of a text; nil where a rule is broken. now: seconds since 1970.
function M.parse_advice(text, now)
  if #text > MAX_BYTES or sub(text, -1) ~= "\n" then
    return nil
  end
  local advice, at = read_head(text, now)
  return advice and read_lines(advice, text, at)
end

-- The file read last: a user who submits once mostly submits again, and checking 50 rows takes as long as all the rest.
local kept_text, kept_advice

-- The advice of a file; nil where it must not be used. A FIFO would block: folder and file must be root's.
function M.read_advice(path, now)
  local text = slurp(path)
  if text and (text ~= kept_text or kept_advice.expires <= now) then
    local advice = M.parse_advice(text, now)
    if not advice then
      return nil
    end
    kept_text, kept_advice = text, advice
  end
  return text and kept_advice
end

-- round() of Python: to the even one of two equally near.
local function round(x)
  local below = floor(x)
  local part = x - below
  if part > 0.5 or (part == 0.5 and below % 2 == 1) then
    return below + 1
  end
  return below
end

-- The site factor for a predicted GPU-time (advisor/priority.py). priority: from the advice file.
function M.site_factor(gpu_time_s, priority)
  local held = min(max(gpu_time_s, priority.min), priority.max)
  return round(priority.k * log(priority.max / held))
end

local function or_nil(field)
  if field ~= "-" then
    return field
  end
end

-- The row that begins with a key, with the site factor of the whole submission; nil if there is none.
local function row_of(advice, key, gpus)
  local before = find(advice.text, "\n" .. key .. "\t", 1, true)
  if not before then
    return nil
  end
  local name, predicted, factor, bound, tier, _, text = match(advice.text, FIELDS, before + 1)
  local row = { kind = sub(key, 1, 1), gpus = gpus, predicted_s = tonumber(predicted), site_factor = tonumber(factor) }
  if row.kind == "F" then
    row.key, row.bound_mib = name, tonumber(bound)
    row.tier, row.text = or_nil(tier), or_nil(text)
  elseif row.kind == "U" then
    row.site_factor = row.site_factor + M.site_factor(row.predicted_s * gpus, advice.priority)
  end
  return row
end

-- The row for any name with so many GPUs in this file; nil where it has none.
function M.find_any(advice, gpus)
  return row_of(advice, format("G\t-\t%d", gpus), gpus) or row_of(advice, "U\t-\t-", gpus)
end

-- The row for a name key and GPU count in this file.
function M.find(advice, key, gpus)
  return row_of(advice, format("F\t%s\t%d", key, gpus), gpus) or M.find_any(advice, gpus)
end

-- Row and file for a submission: from the user's own file, else the row for any name of `_site`. nil without GPUs.
function M.look_up(user, site, key, gpus)
  if gpus <= 0 then
    return nil
  end
  local row = user and M.find(user, key, gpus)
  if row then
    return row, user
  end
  row = site and M.find_any(site, gpus)
  return row or nil, row and site
end

-- The sentences for a user; nil where the row has none. They are printable ASCII: nothing else passes the reader.
-- Files of the release before name waits in another field, which is not read.
function M.sentences(row)
  if not row.text then
    return nil
  end
  return (row.tier and row.tier .. " is enough: " or "") .. row.text
end

-- Name keys (almanac/names.py):

local HEX = "[0-9a-f]"
local UUID = concat({ HEX:rep(8), HEX:rep(4), HEX:rep(4), HEX:rep(4), HEX:rep(12) }, "%-")
local LOWER = {}
for letter = 65, 90 do
  LOWER[string.char(letter)] = string.char(letter + 32)
end

-- The letters that mostly follow each letter in words, and the words and beginnings of names that
-- identify no work (generic_names.txt).
local FOLLOWERS = {
  a = "abcdefghijklmnoprstuvwxyz", b = "abcdeilmoprstuy", c = "acdefhiklmoprstuy", d = "abcdefgijklmnoprstuy",
  e = "abcdefghiklmnopqrstuvwxyz", f = "acefilmorstuy", g = "abcdeghilmnoprstuy", h = "acdeilmoprstuy",
  i = "abcdefgiklmnopqrstuvxz", j = "aeiosu", k = "acdegilmoprstuy", l = "abcdefgiklmoprstuvy",
  m = "abcdefgilmnoprstuy", n = "abcdefghijklmnoprstuvy", o = "abcdefghijklmnoprstuvwxy", p = "acdefghiklmoprstuy",
  q = "lu", r = "abcdefgiklmnoprstuvy", s = "abcdefghiklmnopqrstuvwy", t = "abcdefghiklmnoprstuvwxy",
  u = "abcdefgiklmnprstx", v = "aeios", w = "aehilnors", x = "aceilmpsty", y = "abcdefghilmnoprstuvw", z = "aeioyz",
}
local BEGINNINGS = { "sys/dashboard/", "ondemand/", "spawner-", "jupyterhub-", "parsl." }
local GENERIC = [[
 sbatch wrap interactive stdin nojobname noname unnamed untitled none null default nan unknown bash sh zsh ksh csh 
 tcsh dash fish env bin opt sleep python py ipython perl julia matlab rscript java node srun salloc mpirun mpiexec 
 orted hydra pmi proxy torchrun accelerate deepspeed horovodrun apptainer singularity enroot docker podman container 
 conda exec launch launcher starter start sys dashboard dashboards ondemand ood batch connect bc desktop xfce mate 
 gnome vnc novnc apps app dev usr jupyter jupyterlab jupyterhub jhub lab notebook notebooks spawner ipynb ipykernel 
 kernel rstudio server vscode code tunnel ide spyder terminal shell term xterm tmux screen ssh sshd session console 
 dask worker workers scheduler ray head parsl auto block blocks submitit executor pilot fw fireworks snakemake 
 snakejob smk nextflow nf cromwell toil luigi sky gpujob workflow pipeline rule wildcards job jobs jobname myjob my 
 run runs task tasks array main process agent client cmd seed fold stage test tests testing debug demo example hello 
 world try trial tmp temp foo bar baz qux asdf aaa abc xxx xyz script scripts submit submission slurm pbs sge lsf 
 queue gpu gpus cpu cpus cuda nodes mpi new old final copy the and of for with on at by in to or is it an name id no 
 nr num number ver version rev part step steps iter iteration idx index set jan feb mar apr may jun jul aug sep sept 
 oct nov dec january february march april june july august september october november december mon tue tues wed thu 
 thurs fri sat sun monday tuesday wednesday thursday friday saturday sunday am pm utc gmt cet cest est edt pst pdt st 
 rd th date time today day week month year now hour hours hr hrs min mins sec secs uuid guid hash sha uid pid ulid 
 ksuid 
]]

-- Return true if at least three pairs of letters of a word, and a sixth of all, are rare in words.
local function is_random(word)
  local pairs_, rare = 0, 0
  for run in gmatch(word, "[a-z]+") do
    pairs_ = pairs_ + #run - 1
    for at = 1, #run - 1 do
      if not find(FOLLOWERS[sub(run, at, at)], sub(run, at + 1, at + 1), 1, true) then
        rare = rare + 1
      end
    end
  end
  return rare >= 3 and 6 * rare >= pairs_
end

local function mask_word(word)
  if #word < 6 or not find(word, "[0-9]") or not find(word, "[a-z]") then
    return nil
  end
  local is_mixed = find(word, "[a-z][0-9]+[a-z]") or find(word, "[0-9][a-z]+[0-9]")
  if not find(word, "[^0-9a-f]") then
    return (#word >= 8 or is_mixed) and "#" or nil
  end
  return #word >= 10 and is_mixed and is_random(word) and "#" or nil
end

-- Return true if a word of a key is more than a generic name, a part of a hash, or a single letter.
local function identifies(key)
  for _, beginning in ipairs(BEGINNINGS) do
    if sub(key, 1, #beginning) == beginning then
      return false
    end
  end
  for token in gmatch(key, "[a-z#]+") do
    local least = find(token, "#", 1, true) and 4 or 2
    for run in gmatch(token, "[a-z]+") do
      local is_long = #run >= least or (#run >= 2 and find(run, "[^a-f]"))
      if is_long and not find(GENERIC, " " .. run .. " ", 1, true) then
        return true
      end
    end
  end
  return false
end

local function own_key(name)
  local key = gsub(gsub(match(name, "^nf%-([^(]+)_%(") or name, "[^!->@-^`-~]+", "_"), "[A-Z]", LOWER)
  key = gsub(gsub(key, UUID, "#"), "[0-9a-z]+", mask_word)
  key = sub(gsub(key, "[0-9]+", "#"), 1, 64)
  return identifies(key) and key or "-"
end

-- The rule or process that the first word of a workflow manager's comment is; "" in any other comment.
local function rule_of(comment)
  local word = match(comment, "^[^, \t\r\n]*")
  local rule = match(word, "^rule_(.*)$")
  if rule then
    local at = find(rule, "_wildcards_", 1, true)
    return at and sub(rule, 1, at - 1) or rule
  end
  local is_process = match(word, "^[A-Z][A-Z0-9_:]*$") and match(word, "^[A-Z0-9_]+:[A-Z]")
  return (is_process or sub(word, 1, 3) == "nf-") and word or ""
end

-- The family key of a job name, or of the workflow's rule in the comment; "-" is no family.
function M.name_key(name, comment)
  local key = own_key(sub(name, 1, 255))
  if key == "-" and comment then
    key = own_key(rule_of(sub(comment, 1, 255)))
  end
  return key
end

-- The key under which a submission stands in advice: slurmdbd keeps a double quote as a backtick.
function M.job_key(name, comment)
  local function stored(text)
    return (gsub(sub(type(text) == "string" and text or "", 1, 255), '"', "`"))
  end
  return M.name_key(stored(name), stored(comment))
end

-- GPU requests (almanac/tres.py, slurm/sbatch.py):

local TYPE = "[A-Za-z0-9_.+-]+"

-- Count and type of one term: "gpu", "gpu:2", "gres:gpu:a100:2", "gres/gpu=2"; count nil where it cannot be read,
-- nothing at all for other things than GPUs.
local function gpu_term(term)
  local rest = match(gsub(term, "^gres[:/]", ""), "^gpu(.*)$")
  if not rest or find(rest, "^[^:/=]") then
    return true
  end
  if rest == "" then
    return true, 1
  end
  local count = match(rest, "^[:=](%d+)$")
  local kind
  if not count then
    kind, count = match(rest, "^[:/](" .. TYPE .. ")[:=](%d+)$")
  end
  if not count then
    kind = match(rest, "^[:/](" .. TYPE .. ")$")
    count = kind and not find(kind, "^%d+$") and "1"
  end
  return count and #count <= 9, tonumber(count or nil), kind
end

-- GPUs of a comma-separated text: count and type ("" where several or none); nil where a term cannot be read.
-- An untyped total wins over the typed parts it is the sum of.
function M.parse_gpus(text)
  local total, sum, kinds, named = nil, 0, {}, 0
  for term in gmatch(text, "[^,]+") do
    local is_read, count, kind = gpu_term(term)
    if not is_read then
      return nil
    end
    if kind then
      named = named + (kinds[kind] and 0 or 1)
      kinds[kind] = true
      sum = sum + count
    elseif count then
      total = max(total or 0, count)
    end
  end
  return total or sum, named == 1 and next(kinds) or ""
end

-- A number that was asked for; nil for Slurm's ways to say that none was. NO_VAL16 is 65534, NO_VAL 4294967294.
local function asked(value)
  local number = tonumber(value)
  if number and number >= 1 and number < 4294967294 and number ~= 65534 and number ~= 65535 then
    return floor(number)
  end
end

-- GPUs of the whole job, or of one array task: count (0: none asked) and type; nil where it is not known.
-- asks: texts of each way to ask, in the order in which the first that names GPUs counts, with its multiplier.
local function total_gpus(asks)
  local total, kind = 0, ""
  for _, ask in ipairs(asks) do
    if type(ask.text) == "string" and ask.text ~= "" then
      local count, named = M.parse_gpus(ask.text)
      if not count then
        return nil
      end
      total = total > 0 and total or count * ask.times
      kind = kind ~= "" and kind or named
    end
  end
  return total, total > 0 and kind or ""
end

local function nodes_and_tasks(nodes, tasks, per_node)
  nodes = nodes or (tasks and per_node and floor((tasks + per_node - 1) / per_node)) or 1
  return nodes, tasks or (per_node and nodes * per_node) or nodes
end

-- GPUs of slurmctld's job_desc.
function M.gpus_of_job(job)
  local nodes, tasks = nodes_and_tasks(asked(job.min_nodes), asked(job.num_tasks), asked(job.ntasks_per_node))
  return total_gpus({
    { text = job.tres_per_job, times = 1 },
    { text = job.tres_per_node, times = nodes },
    { text = job.tres_per_task, times = tasks },
    { text = job.tres_per_socket, times = nodes * (asked(job.sockets_per_node) or 1) },
  })
end

-- What slurmctld's job_desc asks for, as tiers.lua takes it. A component of a het job has an offset; shared is 0 for
-- whole nodes.
function M.request_of_job(job)
  local count, kind = M.gpus_of_job(job)
  local least, most = asked(job.min_nodes), asked(job.max_nodes)
  local is_spread = (least or most) and (least or 1) ~= 1 or (most or 1) ~= 1
  local has_tasks = not least and not most and (asked(job.num_tasks) or 1) > 1 and (job.tres_per_job or "") == ""
  return {
    constraints = job.features or "", partition = job.partition or "", gpu_count = count, gpu_type = kind or "",
    may_use_more = is_spread or has_tasks or job.shared == 0 or (asked(job.het_job_offset) or 0) > 0,
  }
end

return M
