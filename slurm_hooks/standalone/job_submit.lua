-- job_submit.lua for a site without one of its own: copy it beside slurm.conf and set JobSubmitPlugins=lua.
-- It accepts every submission and every change. The guarded line sets the site factor when the advice files say so.

function slurm_job_submit(job_desc, part_list, submit_uid)
  pcall(function() dofile("/usr/share/almanac/lua/job_submit.lua").submit(job_desc, submit_uid) end)
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
