-- dialogue.lua: shows the advice of cli_filter.lua at a terminal, asks, and applies the answer. It runs as the user in
-- sbatch, srun, or salloc, and reads the user's one advice file. It starts programs only when it has something to say:
-- sh, to test for a terminal and to make a folder; sinfo, to check that nodes can take the changed submission.

local M = {}

local COMMANDS = { sbatch = true, srun = true, salloc = true }
local MODES = { show = true, ask = true, apply = true }
-- sbatch-almanac leaves an open file with this number whose offset ends in 1 where it has said something already.
local MARK, MARKED = "/proc/self/fdinfo/719", "pos:%s*71900000000%d%d%d1%s"
-- What is read of a request, and how long each may be: slurmctld refuses longer ones.
local BOUNDED = {
  "job-name", "constraint", "partition", "gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task",
  "tres-per-task", "nodes", "ntasks", "ntasks-per-node", "sockets-per-node",
}
local MAX_BYTES = 1024
local DEFAULT_NAMES = { sbatch = "sbatch", salloc = "interactive", srun = "" }

local getenv, match = os.getenv, string.match

-- The beginning of a file of /proc, "" where there is none.
local function proc(path)
  local file = io.open(path, "r")
  local text = file and file:read(4096) or ""
  if file then
    file:close()
  end
  return text
end

-- Whether the options or an earlier message forbid advice. srun's jobid is a number for a step of a job, else "unset".
local function is_out(options, mode)
  return not COMMANDS[options["type"]] or options["test-only"] == "set" or options["clusters"]
    or string.find(options["jobid"] or "", "^%d") or string.find(proc(MARK), MARKED)
    or (mode ~= "apply" and (options["parsable"] == "set" or (tonumber(options["quiet"]) or 0) > 0))
end

local function is_oversized(options)
  for _, name in ipairs(BOUNDED) do
    if #tostring(options[name] or "") > MAX_BYTES then
      return true
    end
  end
  return false
end

local function did(result)
  return result == 0 or result == true -- of os.execute in Lua 5.1, and later
end

-- Standard input and standard error are terminals. /proc alone cannot tell: fdinfo has no device number, and a mount
-- number says it for /dev/pts of one's own mount namespace only. sh says it for sure, in 1 ms, and only a user who is
-- about to read something waits for it.
local function has_terminal()
  return did(os.execute("test -t 0 && test -t 2"))
end

-- The job's name as slurmctld will have it.
function M.job_name(options)
  local argv = options["argv"]
  local program = type(argv) == "table" and argv[1]
  local wrap = options["type"] == "sbatch" and options["wrap"]
  local base = program and string.match(program, "([^/]*)$")
  return options["job-name"] or (wrap and "wrap") or base or DEFAULT_NAMES[options["type"]]
end

-- A pipe in place of a file would make its reader wait. One that can be written to can be recognized without waiting.
local function is_pipe(path)
  local file = io.open(path, "r+b")
  local size = file and file:seek("end")
  if file then
    file:close()
  end
  return file and not size
end

-- Where the user's answers and the listing of nodes are kept; nil where the environment does not say.
local function own_folder()
  local state, home = getenv("XDG_STATE_HOME") or "", getenv("HOME") or ""
  if string.sub(state, 1, 1) ~= "/" then
    if string.sub(home, 1, 1) ~= "/" then
      return nil
    end
    state = home .. "/.local/state"
  end
  return state .. "/almanac/"
end

-- A file of the user's own, "" where there is none; only one that they can write is theirs. (A link is followed: it is
-- theirs too.)
local function read_own(path, most)
  local file = path and io.open(path, "r+b")
  if not file then
    return ""
  end
  local size = file:seek("end")
  local text = size and size <= most and file:seek("set") and file:read(most)
  file:close()
  return text or ""
end

local function quoted(text)
  return "'" .. string.gsub(text, "'", "'\\''") .. "'"
end

-- Makes the folder and an empty file that nobody else can read; Lua itself can do neither.
local function write_own(path, text)
  local new = path .. "." .. (string.match(proc("/proc/self/stat"), "^%d+") or "new")
  local folder = string.match(path, "^(.*)/")
  local make = "umask 077; mkdir -p -- %s && set -C && : > %s"
  if not did(os.execute("{ " .. string.format(make, quoted(folder), quoted(new)) .. "; } 2>/dev/null")) then
    return false
  end
  local file = io.open(new, "r+b")
  local is_written = file and file:write(text) and file:flush()
  local is_done = file and file:close() and is_written and os.rename(new, path)
  if not is_done then
    os.remove(new)
  end
  return is_done
end

local function remember(proposal, path, choices, new)
  local is_kept = path and write_own(path, proposal.choices_text(choices, new))
  if not is_kept and new.word ~= "asked" then
    io.stderr:write("almanac: could not save your answer\n")
  end
end

-- srun blocks SIGINT until it has submitted, and then forgets it: what Ctrl-C meant at the question is done here.
local function was_interrupted()
  local pending = string.match(proc("/proc/self/status"), "\nShdPnd:%s*%x-(%x)\n")
  return pending ~= nil and string.find("2367abef", pending, 1, true) ~= nil
end

-- One line from the terminal means yes, no, always or never; its end means no.
local function ask(proposal, found)
  io.stderr:write(proposal.question(found))
  local line = io.stdin:read("*l")
  if was_interrupted() then
    os.exit(130)
  end
  if not line then
    io.stderr:write("\n")
  end
  return proposal.answer(line)
end

-- What sinfo says of all nodes, as offer.lua takes it; "" where it does not within 1 s. Asked once in five minutes,
-- and for a MIG slice once in half a minute.
local function nodes(offer, folder, now, is_slice)
  local place = match(proc("/proc/sys/kernel/hostname"), "^[^\n]*") .. ":" .. (getenv("SLURM_CONF") or "")
  local kept = offer.kept(read_own(folder and folder .. "nodes", offer.MAX_BYTES), now, place, is_slice and offer.SLICE_AGE_S)
  if kept then
    return kept
  end
  -- The second timeout ends the pipe even if sinfo, or what it started, keeps it open.
  local command = "unset SINFO_ALL SINFO_PARTITION SINFO_FORMAT SINFO_SORT; timeout -s KILL 1 sinfo -a -e -h -o '"
  local pipe = io.popen(command .. offer.FORMAT .. "' </dev/null 2>/dev/null | timeout -s KILL 1 cat", "r")
  local text = pipe and pipe:read(offer.MAX_BYTES) or ""
  if pipe then
    pipe:close()
  end
  if #text > offer.MAX_BYTES - 1024 then
    return ""
  end
  if folder and text ~= "" then
    write_own(folder .. "nodes", offer.to_keep(text, now, place))
  end
  return text
end

-- Whether the change is one that nodes exist for: true, false, or nil where that is not known.
local function is_offered(almanac, found, options, offer, listing)
  local option, value = found.check_option or found.option, found.check_value or found.value
  local wanted = offer.wanted(found.request, option, value, found.tier)
  return offer.is_offered(listing, wanted, offer.needs_of(options, found.gpus, almanac.parse_gpus))
end

-- Shows the message and asks where it should. Returns whether to change the submission, and whether it said anything.
local function settle(modules, found, options, mode, now)
  local proposal, folder = modules.proposal, own_folder()
  local path = folder and folder .. "choices"
  local choices = proposal.parse_choices(read_own(path, 65536))
  local earlier = proposal.find_choice(choices, found.choice_key or found.key, found.gpus)
  local action = proposal.action(mode, found, earlier, now)
  if action == "nothing" or (action ~= "change" and not has_terminal()) then
    return false, false
  end
  if found.value then
    local offer = dofile(modules.dir .. "offer.lua")
    local listing = nodes(offer, folder, now, found.tier.compute_slices ~= nil)
    proposal.checked(found, is_offered(modules.almanac, found, options, offer, listing))
    action = proposal.action(mode, found, earlier, now)
  end
  if action == "nothing" or action == "change" then
    return action == "change", false
  elseif action == "change and say" then
    io.stderr:write(proposal.always_said(found))
    return true, true
  end
  io.stderr:write(proposal.message(found))
  local word = action == "ask" and ask(proposal, found) or nil
  remember(proposal, path, choices, proposal.new_choice(found, earlier, word, now))
  return word == "yes" or word == "always", true
end

-- Another GPU type: the proposal, or nil. root: of the advice files; own: the user's folder there.
local function type_proposal(almanac, tiers, options, request, now, root, own, lua_dir)
  local path = root .. "/user/_site/waits"
  if is_pipe(path) or is_pipe(own .. "/times") then
    return nil
  end
  local text = almanac.slurp(path)
  if not text then
    return nil
  end
  local types = dofile(lua_dir .. "types.lua")
  local waits = types.parse_waits(text, now)
  if not waits then
    return nil
  end
  local key = almanac.job_key(M.job_name(options), options["comment"])
  request.node_count = tonumber(match(tostring(options["nodes"] or ""), "^%d+")) or 1
  request.time_limit_s = dofile(lua_dir .. "offer.lua").seconds(tostring(options["time"] or ""))
  local times = types.parse_times(almanac.slurp(own .. "/times") or "", now, key, request.gpu_count)
  return types.propose(tiers, request, times, waits, key)
end

-- Whether the job packs its GPUs already, as far as its script or what is wrapped tells.
local function packs(almanac, options, program)
  local argv, command = options["argv"], options["wrap"]
  local path = not command and type(argv) == "table" and argv[1]
  if type(path) == "string" then
    local folder = string.sub(path, 1, 1) ~= "/" and options["chdir"]
    path = (folder and folder .. "/" or "") .. path
    command = not is_pipe(path) and almanac.slurp(path)
  end
  return string.find(command or "", program, 1, true) ~= nil
end

-- A note for an array whose tasks can share a GPU, once a day for each job family. own: the user's advice folder.
local function note_packing(modules, tiers, options, request, advice, now, own)
  if options["type"] ~= "sbatch" or is_pipe(own .. "/packing") then
    return
  end
  local text = modules.almanac.slurp(own .. "/packing")
  local packing = text and dofile(modules.dir .. "packing.lua")
  local name = M.job_name(options)
  local key = modules.almanac.job_key(name, options["comment"])
  local row = packing and packing.parse(text, now, key, request.gpu_count)
  if not row or string.find(key, packing.PROGRAM, 1, true) == 1 or not packing.fits(tiers, request, advice.tiers, row)
    or not packing.is_sweep(options["array"]) or packs(modules.almanac, options, packing.PROGRAM) then
    return
  end
  local folder, proposal = own_folder(), modules.proposal
  local path = folder and folder .. "packing"
  local noted = proposal.parse_choices(read_own(path, 65536))
  local earlier = proposal.find_choice(noted, row.key, row.gpus)
  local age = earlier and now - earlier.time
  if (age and age >= 0 and age < packing.AGAIN_S) or not has_terminal() then
    return
  end
  io.stderr:write(proposal.note(row.text))
  local new = { key = row.key, gpus = row.gpus, word = "asked", tier = "packing", time = now }
  if path then
    write_own(path, proposal.choices_text(noted, new, packing.AGAIN_S))
  end
end

-- mode: $ALMANAC_ADVICE, nil where it is not set. advice_dir: the root of the advice files. lua_dir: where the modules
-- are. offset: of a component of a het job.
function M.run(options, mode, advice_dir, lua_dir, offset)
  if is_out(options, mode) or is_oversized(options) then
    return
  end
  local uid = string.match(proc("/proc/self/status"), "\nUid:%s+(%d+)")
  local own = string.format("%s/user/%s", advice_dir, uid or "")
  local path = own .. "/advice"
  if not uid or is_pipe(path) then
    return
  end
  local almanac = dofile(lua_dir .. "almanac.lua")
  local now = os.time()
  local advice = almanac.read_advice(path, now)
  local request = advice and almanac.request_of_options(options, offset)
  if not request or (request.gpu_count or 0) <= 0 then
    return
  end
  local proposal = dofile(lua_dir .. "proposal.lua")
  local row = almanac.find(advice, almanac.job_key(M.job_name(options), options["comment"]), request.gpu_count)
  local tiers = dofile(lua_dir .. "tiers.lua")
  local modules = { almanac = almanac, proposal = proposal, dir = lua_dir }
  local finders = {
    function() return proposal.propose(tiers, request, row, advice) end,
    function() return type_proposal(almanac, tiers, options, request, now, advice_dir, own, lua_dir) end,
  }
  local chosen, is_proposed = MODES[mode] and mode or advice.prompt, false
  for _, find in ipairs(finders) do
    local found = find()
    local is_changed, was_told
    if found then
      is_proposed = true
      is_changed, was_told = settle(modules, found, options, chosen, now)
    end
    if is_changed then
      options[string.match(found.option, "^%-%-(.*)")] = found.value
    end
    if is_changed or was_told then
      return
    end
  end
  -- Beside another tier or type, silent or not, packing would be a second advice on the same GPU.
  if not is_proposed and (chosen == "show" or chosen == "ask") and type(options["array"]) == "string" then
    note_packing(modules, tiers, options, request, advice, now, own)
  end
end

return M
