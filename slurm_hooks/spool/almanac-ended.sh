#!/bin/sh
# Tells almanac that a job has ended, so that its report goes out within minutes. Without it the report waits for the
# next `almanac ingest`; nothing else is lost where it fails.
#
# slurm.conf names a copy of it, which `almanac install-hooks ended` makes: slurmctld 24.11 and 26.05 do not start where
# the script is missing. Either
#     EpilogSlurmctld=/etc/slurm/almanac-ended.sh
# or
#     JobCompType=jobcomp/script
#     JobCompLoc=/etc/slurm/almanac-ended.sh
# A site that uses both for something else calls it from its EpilogSlurmctld, in a line by itself:
#     [ ! -x /etc/slurm/almanac-ended.sh ] || /etc/slurm/almanac-ended.sh
#
# ALMANAC_SPOOL_DIR    where the file goes (default /var/spool/almanac/ended), which is only SlurmUser's and almanac's
#                      to write: docs/admin.md.
#
# slurmctld keeps a job in COMPLETING until EpilogSlurmctld is done, and jobcomp/script runs for one job after another.
# So no program is started here: the shell alone makes one file with one write. Neither has a PATH. Seen in both:
# SLURM_JOB_ID and SLURM_CLUSTER_NAME (EpilogSlurmctld), JOBID and CLUSTER (jobcomp/script); an array's task has its own
# id (JobIDRaw). Whose job it was is not written: accounting says so.
umask 022
job=${SLURM_JOB_ID:-$JOBID}
cluster=${SLURM_CLUSTER_NAME:-$CLUSTER}
case $job in '' | *[!0-9]*) exit 0 ;; esac
case $cluster in *[!0-9A-Za-z_.-]*) exit 0 ;; esac
# almanac's group can write to the folder too: a name that nobody can guess, and a new file only (set -C), so that no
# planted link or FIFO is opened. A job that was requeued ends again, and gets another name.
set -C
read -r unique 2>/dev/null </proc/sys/kernel/random/uuid || exit 0
printf 'job_id=%s\ncluster=%s\n' "$job" "$cluster" \
    2>/dev/null >"${ALMANAC_SPOOL_DIR:-/var/spool/almanac/ended}/$job.$unique"
exit 0
