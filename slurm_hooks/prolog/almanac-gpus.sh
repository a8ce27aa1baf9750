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
#                      On nodes with MIG, where Slurm's index is not the GPU's, one per GPU and instance: 0.7. dcgm-exporter
#                      reads these from 4.8.2 on; older ones skip names that are no number.
# ALMANAC_MIG_MAP      file below a tmpfs that says which GPU and instance each MIG UUID is (default
#                      /run/almanac/mig), written by nvidia-smi in the background: that can take long or hang.
# ALMANAC_NVIDIA_SMI   path of nvidia-smi, where it is not in /usr/bin or /bin.
#
# Seen in the Prolog and in the Epilog of slurmd 22.05.8: no PATH; SLURM_JOB_GPUS=0,1 (absent without GPUs),
# SLURM_JOB_ID (an array task's own, JobIDRaw), SLURMD_NODENAME, SLURM_CLUSTER_NAME, SLURM_JOB_UID. None of
# these is the user's to write. With AutoDetect=nvml and MIG, CUDA_VISIBLE_DEVICES has the instances' UUIDs
# (by Slurm's source, 22.05 to 26.05: gres_common_prep_set_env). Nothing here may fail a job: a Prolog that fails drains the node.

PATH=/usr/bin:/bin
export PATH
umask 022
# A site may have opened a folder to others, such as dcgm-exporter's user. So each file is made under a name that nobody
# can guess, as a new one only (set -C), and then renamed: nothing that was planted is opened for writing.
set -C
read -r unique 2>/dev/null </proc/sys/kernel/random/uuid || exit 0
map=${ALMANAC_MIG_MAP:-/run/almanac/mig}
smi=${ALMANAC_NVIDIA_SMI:-nvidia-smi}

# "mig=<MIG UUID> <GPU UUID> <GPU instance id>" for each instance of the job that the map knows.
mig_lines() {
    [ -f "$map" ] && [ -r "$map" ] || return 0
    while read -r device gpu instance index; do
        case ,$devices, in *",$device,"*) printf 'mig=%s %s %s\n' "$device" "$gpu" "$instance" ;; esac
    done <"$map"
}

# Whether an instance of the job is not on the map. MIG-GPU-.../7/0, as older drivers have it, needs none.
is_unmapped() {
    set -f
    IFS=,
    for device in $devices; do
        case $device in
        MIG-GPU-*) ;;
        MIG-*) grep -q "^$device " "$map" 2>/dev/null || return 0 ;;
        esac
    done
    return 1
}

# One at a time, and none while another hangs. nvidia-smi -L has the UUID of each MIG device, -q -x its instance.
write_map() {
    mkdir -p "${map%/*}"
    find "$map.lock" -maxdepth 0 -mmin +60 -exec rmdir {} \;
    mkdir "$map.lock" || return
    {
        timeout -k 5 60 "$smi" -L
        timeout -k 5 60 "$smi" -q -x
    } | head -c 16777216 | awk '
        function tag(line) { gsub(/<[^>]*>|[ \t\r]/, "", line); return line }
        function listed(line) { sub(/.*UUID: /, "", line); sub(/\).*/, "", line); return line }
        /^GPU [0-9]+:/ { gpu = listed($0); index_of[gpu] = $2 + 0 }
        /^[ \t]+MIG .*Device +[0-9]+:/ {
            device = listed($0); sub(/:.*/, ""); sub(/.*Device +/, ""); name[gpu, $0] = device; next
        }
        /<mig_device>/ { is_inside = 1 }
        /<\/mig_device>/ { is_inside = 0 }
        is_inside && /<index>/ { place = tag($0) }
        is_inside && /<gpu_instance_id>/ { instance[place] = tag($0) }
        /<uuid>GPU-/ { uuid = tag($0) }
        /<\/gpu>/ {
            for (place in instance)
                if ((uuid, place) in name) print name[uuid, place], uuid, instance[place], index_of[uuid]
            split("", instance)
        }' >"$map.$unique" && mv -T "$map.$unique" "$map" || rm -f "$map.$unique"
    rmdir "$map.lock"
}

# For the map that another job has written, as long as nvidia-smi may take. Fails where that hangs.
wait_for_map() {
    tries=150
    while [ -d "$map.lock" ] && [ $tries -gt 0 ]; do
        sleep 1
        tries=$((tries - 1))
    done
    [ ! -d "$map.lock" ]
}

record() {
    dir=${ALMANAC_PROLOG_DIR:-/var/spool/almanac/gpus}
    [ -d "$dir" ] || mkdir -p "$dir" || return
    now=${made:-$(date +%s)}
    name=${SLURM_CLUSTER_NAME:-cluster}.$SLURM_JOB_ID.$SLURMD_NODENAME.$now
    # Readers skip names that begin with a dot; a rename shows them the whole record or none.
    {
        printf 'job_id=%s\nhost=%s\ngpus=%s\nuid=%s\ntime=%s\n' \
            "$SLURM_JOB_ID" "$SLURMD_NODENAME" "$SLURM_JOB_GPUS" "$SLURM_JOB_UID" "$now" &&
            { [ -z "$devices" ] || printf 'cuda=%s\n' "$devices"; } && mig_lines
    } >"$dir/.$unique" &&
        mv -T "$dir/.$unique" "$dir/$name" || rm -f "$dir/.$unique"
}

# The job, as the last one of a file or not at all: map_job FILE add|drop. The GPU's other jobs (sharing by MPS) stay.
map_job() {
    jobs=
    if [ -f "$1" ] && [ ! -L "$1" ]; then
        while read -r job; do
            [ "$job" = "$SLURM_JOB_ID" ] || jobs="$jobs$job
"
        done <"$1"
    fi
    [ "$2" = drop ] || jobs="$jobs$SLURM_JOB_ID
"
    printf '%s' "$jobs" >"$ALMANAC_HPC_JOB_DIR/.$unique" &&
        mv -T "$ALMANAC_HPC_JOB_DIR/.$unique" "$1" || rm -f "$ALMANAC_HPC_JOB_DIR/.$unique"
}

# Only those that the map knows already: what is written later could come after the Epilog, and stay.
map_instances() {
    [ -f "$map" ] && [ -r "$map" ] || return 0
    [ -d "$ALMANAC_HPC_JOB_DIR" ] || mkdir -p "$ALMANAC_HPC_JOB_DIR" || return
    while read -r device gpu instance index; do
        case ,$devices, in *",$device,"*)
            case $index.$instance in
            .* | *. | *.*.* | *[!0-9.]*) ;;
            *) map_job "$ALMANAC_HPC_JOB_DIR/$index.$instance" add ;;
            esac
            ;;
        esac
    done <"$map"
}

# Out of every file: the Epilog may be told of other GPUs than the Prolog, or of none (a job that Slurm aborted because
# the Gres of its node changed), and the node may have got MIG in between.
unmap_job() {
    for file in "$ALMANAC_HPC_JOB_DIR"/*; do
        if [ -f "$file" ] && [ ! -L "$file" ] && grep -qx "$SLURM_JOB_ID" "$file"; then map_job "$file" drop; fi
    done
}

main() {
    case $SLURM_JOB_ID in '' | *[!0-9]*) return ;; esac
    if [ "$when" = epilog ]; then
        [ -z "$ALMANAC_HPC_JOB_DIR" ] || unmap_job
        return
    fi
    [ -n "$SLURM_JOB_GPUS" ] || return
    [ -n "$SLURMD_NODENAME" ] || return
    case $CUDA_VISIBLE_DEVICES in
    *[!0-9A-Za-z,/-]*) ;;
    *GPU-* | *MIG-*) devices=$CUDA_VISIBLE_DEVICES ;;
    esac
    if [ "$when" = map ]; then
        { write_map || wait_for_map; } && record
        return
    fi
    if [ "$when" = prolog ]; then
        record
        # The record is written again, with the instances, once the map is there; the job does not wait for it.
        # In a session of its own, which no signal to the Prolog's process group reaches.
        # shellcheck disable=SC2016
        (is_unmapped) && setsid sh -c '"$0" map "$1" &' "$0" "$now"
    fi
    [ -n "$ALMANAC_HPC_JOB_DIR" ] || return
    case $devices in
    *MIG-*)
        map_instances
        return
        ;;
    esac
    [ ! -s "$map" ] || return
    [ -d "$ALMANAC_HPC_JOB_DIR" ] || mkdir -p "$ALMANAC_HPC_JOB_DIR" || return
    IFS=,
    for gpu in $SLURM_JOB_GPUS; do
        case $gpu in '' | *[!0-9]*) ;; *) map_job "$ALMANAC_HPC_JOB_DIR/$gpu" add ;; esac
    done
}

when=${1:-prolog}
made=$2
devices=
# A subshell: a failed redirection of its own would end the script with an error.
(main) </dev/null >/dev/null 2>&1
exit 0
