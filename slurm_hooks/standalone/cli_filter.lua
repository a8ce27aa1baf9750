-- cli_filter.lua for a site without one of its own: copy it beside slurm.conf on every host that runs
-- srun, sbatch, or salloc (login and compute nodes), and only then set CliFilterPlugins=lua.
-- It accepts every submission. The guarded line shows advice to a user at a terminal.

function slurm_cli_setup_defaults(options, early_pass)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  pcall(function() dofile("/usr/share/almanac/lua/cli_filter.lua").pre_submit(options, offset) end)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
  return slurm.SUCCESS
end

return slurm.SUCCESS
