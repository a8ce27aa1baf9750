-- cli_filter.lua: asks a user at a terminal about almanac's advice, in sbatch, srun, and salloc. The site's own
-- cli_filter.lua has
--   pcall(function() dofile("/usr/share/almanac/lua/cli_filter.lua").pre_submit(options, offset) end)
-- as the first line of its slurm_cli_pre_submit. It runs as the user. At a terminal, and for a job with GPUs, it starts
-- almanac-prompt (slurm_hooks/submit/prompt.py), which gets the submission as JSON and says what to change.

local M = {}

local find, format, gsub, match, sub = string.find, string.format, string.gsub, string.match, string.sub

local COMMANDS = { sbatch = true, srun = true, salloc = true }
local NAME_GPUS = { "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket" }
-- The options that almanac-prompt reads. Slurm refuses values above MAX_BYTES. A comment may be longer; it is cut.
local OPTIONS = {
  "job-name", "constraint", "partition", "gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task",
  "tres-per-task", "nodes", "ntasks", "ntasks-per-node", "sockets-per-node", "cpus-per-task", "cpus-per-gpu", "mincpus",
  "mem", "mem-per-cpu", "mem-per-gpu", "time", "exclusive", "array", "chdir", "nodelist", "nodefile", "exclude",
  "reservation",
}
local MAX_BYTES, MAX_JSON, MAX_COMMENT, MAX_WRAP = 1024, 32768, 255, 65536
-- sbatch-almanac leaves an open file with this number whose offset ends in 1 where it has said something already.
local MARK, MARKED = "/proc/self/fdinfo/719", "pos:%s*71900000000%d%d%d1%s"
-- timeout ends a prompt that has not asked within WAIT_S; one that asks ends timeout. The caller's environment stays out.
-- Descriptors: 3 the submission, 4 the terminal's output; other errors are nobody's.
local WAIT_S = 2
local RUN = [[
test -x %s || exit 0
exec /usr/bin/timeout --foreground -s KILL %d /usr/bin/env -i "PATH=$PATH" "HOME=$HOME" \
  "XDG_STATE_HOME=$XDG_STATE_HOME" "ALMANAC_ADVICE=$ALMANAC_ADVICE" ${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} %s \
  4>&2 2>/dev/null 3<<'END'
%s
END
]]
local AT_TERMINAL = "test -t 0 && test -t 2 || exit 0\n"

-- The beginning of a file of /proc, "" where there is none.
local function proc(path)
  local file = io.open(path, "r")
  local text = file and file:read(4096) or ""
  if file then
    file:close()
  end
  return text
end

-- Whether our process group has the terminal: in the background a question would stop us.
-- /proc/self/stat: pid (name) state ppid pgrp session tty tpgid ...; the name may hold anything, ")" too.
local function is_foreground()
  local group, terminal, owner = match(proc("/proc/self/stat"), "^.*%) %S %d+ (%d+) %d+ (%-?%d+) (%-?%d+)")
  return terminal ~= "0" and owner ~= nil and group == owner
end

-- Whether the options or an earlier message forbid advice. srun's jobid is a number for a step of a job, else "unset".
local function is_out(options, mode)
  return not COMMANDS[options["type"]] or options["test-only"] == "set" or options["clusters"]
    or find(options["jobid"] or "", "^%d") or find(proc(MARK), MARKED)
    or (mode ~= "apply" and (options["parsable"] == "set" or (tonumber(options["quiet"]) or 0) > 0))
end

local function asks_gpus(options)
  for _, name in ipairs(NAME_GPUS) do
    if (options[name] or "") ~= "" then
      return true
    end
  end
  return find(options["gres"] or "", "gpu", 1, true) or find(options["tres-per-task"] or "", "gpu", 1, true)
end

local function json(text)
  return '"' .. gsub(text, '[%c"\\\127-\255]', function(c) return format("\\u%04x", string.byte(c)) end) .. '"'
end

-- The program or script that is submitted; "" where sbatch reads it from standard input.
local function command_of(options)
  local argv = options["argv"]
  return type(argv) == "table" and argv[1] or ""
end

-- The submission as one line of JSON, its bytes as Latin-1; nil where Slurm would refuse it.
function M.submission(options, offset, advice_dir)
  local wrap = options["type"] == "sbatch" and options["wrap"]
  local told = {
    type = options["type"], offset = tostring(offset or 0), advice_dir = advice_dir, command = command_of(options),
    comment = sub(options["comment"] or "", 1, MAX_COMMENT),
    wrap = wrap and (find(sub(wrap, 1, MAX_WRAP), "almanac-pack", 1, true) and "almanac-pack" or "wrap") or nil,
  }
  for _, name in ipairs(OPTIONS) do
    told[name] = options[name] and tostring(options[name])
  end
  local parts, size = {}, 0
  for name, text in pairs(told) do
    if #text > MAX_BYTES then
      return nil
    end
    parts[#parts + 1] = json(name) .. ":" .. json(text)
    size = size + #parts[#parts]
  end
  return size <= MAX_JSON and "{" .. table.concat(parts, ",") .. "}" or nil
end

-- As pip installs almanac, its programs lie in bin/ of the same environment.
local function program(lua_dir)
  local environment = match(lua_dir, "^(/.*)/lib[^/]*/python[^/]*/site%-packages/slurm_hooks/lua/$")
  return environment and environment .. "/bin/almanac-prompt" or "/usr/libexec/almanac/almanac-prompt"
end

-- srun blocks SIGINT until it has submitted, and then forgets it: what Ctrl-C meant at the question is done here.
local function was_interrupted()
  local pending = match(proc("/proc/self/status"), "\nShdPnd:%s*%x-(%x)\n")
  return pending ~= nil and find("2367abef", pending, 1, true) ~= nil
end

local function run(options, offset, dirs)
  local mode = os.getenv("ALMANAC_ADVICE")
  if mode == "off" or os.getenv("SLURM_JOB_ID") or (mode ~= "apply" and not is_foreground()) or is_out(options, mode)
    or not asks_gpus(options) then
    return
  elseif options["type"] == "sbatch" and not options["wrap"] and command_of(options) == "" then
    return -- the script will come from standard input
  end
  local own_dir = match(debug.getinfo(1, "S").source, "^@(.*/)") or ""
  local told = M.submission(options, offset, dirs.advice or "/var/lib/almanac-advice")
  if not told then
    return
  end
  local path = "'" .. gsub(dirs.prompt or program(own_dir), "'", "'\\''") .. "'"
  local pipe = io.popen((mode == "apply" and "" or AT_TERMINAL) .. format(RUN, path, dirs.wait_s or WAIT_S, path, told), "r")
  local answer = pipe:read("*a")
  pipe:close()
  if was_interrupted() then
    os.exit(130)
  end
  local name, value = match(answer, "^([%l-]+)\t(.+)$")
  if name then
    options[name] = value
  end
end

-- Never raises. dirs: advice (root of the advice files) and prompt (the program), where these are not in their usual
-- places; wait_s: seconds that a silent prompt gets. The components of a het job come one by one; each is asked about at most once.
function M.pre_submit(options, offset, dirs)
  pcall(run, options, offset, dirs or {})
end

return M
