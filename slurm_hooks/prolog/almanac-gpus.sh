#!/bin/sh
# Records which GPUs of this node a job got: sacct does not keep the indices.
#
# slurm.conf:  Prolog=/usr/libexec/almanac/almanac-gpus.sh
#              PrologFlags=Alloc            (else a node runs it only when its first step starts there)
# As Epilog (only for the mapping folder below), a script that runs: almanac-gpus.sh epilog
#
# ALMANAC_PROLOG_DIR   one record per job and node goes here (default /var/spool/almanac/gpus). A local disk:
#                      a Prolog that waits for a file server keeps the job waiting.
# ALMANAC_HPC_JOB_DIR  dcgm-exporter's --hpc-job-mapping-dir: one file per GPU index, a job id per line.
#                      Not set: not kept. Below /run, a reboot in the middle of a job leaves nothing stale.
#
# Seen in the Prolog and in the Epilog of slurmd 22.05.8: no PATH; SLURM_JOB_GPUS=0,1 (absent without GPUs),
# SLURM_JOB_ID (an array task's own, JobIDRaw), SLURMD_NODENAME, SLURM_CLUSTER_NAME, SLURM_JOB_UID. None of
# these is the user's to write. Nothing here may fail a job: a Prolog that fails drains the node.

PATH=/usr/bin:/bin
export PATH
umask 022

record() {
    dir=${ALMANAC_PROLOG_DIR:-/var/spool/almanac/gpus}
    [ -d "$dir" ] || mkdir -p "$dir" || return
    now=$(date +%s)
    name=${SLURM_CLUSTER_NAME:-cluster}.$SLURM_JOB_ID.$SLURMD_NODENAME.$now
    # Readers skip names that begin with a dot; a rename shows them the whole record or none.
    printf 'job_id=%s\nhost=%s\ngpus=%s\nuid=%s\ntime=%s\n' \
        "$SLURM_JOB_ID" "$SLURMD_NODENAME" "$SLURM_JOB_GPUS" "$SLURM_JOB_UID" "$now" >"$dir/.$name" &&
        mv "$dir/.$name" "$dir/$name" || rm -f "$dir/.$name"
}

# The GPU's other jobs (sharing by MPS) stay; this one is added by the Prolog and dropped by the Epilog.
map_gpu() {
    file=$ALMANAC_HPC_JOB_DIR/$1
    jobs=
    if [ -e "$file" ]; then
        while read -r job; do
            [ "$job" = "$SLURM_JOB_ID" ] || jobs="$jobs$job
"
        done <"$file"
    fi
    [ "$when" = epilog ] || jobs="$jobs$SLURM_JOB_ID
"
    printf '%s' "$jobs" >"$file"
}

main() {
    case $SLURM_JOB_ID in '' | *[!0-9]*) return ;; esac
    [ -n "$SLURM_JOB_GPUS" ] || return
    [ -n "$SLURMD_NODENAME" ] || return
    [ "$when" = epilog ] || record
    [ -n "$ALMANAC_HPC_JOB_DIR" ] || return
    [ -d "$ALMANAC_HPC_JOB_DIR" ] || mkdir -p "$ALMANAC_HPC_JOB_DIR" || return
    IFS=,
    for gpu in $SLURM_JOB_GPUS; do
        case $gpu in '' | *[!0-9]*) ;; *) map_gpu "$gpu" ;; esac
    done
}

when=${1:-prolog}
# A subshell: a failed redirection of its own would end the script with an error.
(main) </dev/null >/dev/null 2>&1
exit 0
