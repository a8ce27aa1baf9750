#!/bin/sh
# Prints "HOST STATUS SECONDS": whether srun, sbatch and salloc work on this host with CliFilterPlugins=lua. Wherever
# cli_filter.lua is missing then, they end at once, job steps too: "srun: fatal: failed to initialize cli_filter plugin"
# (22.05: "srun: error: cli_filter plugin terminated with error").
#
# Run it on every host that submits or starts steps (login nodes, compute nodes), with no need of almanac there, and
# keep what all of them say for `almanac doctor` (docs/hooks.md):
#     clush -qNw @all sh -s <almanac-cli-filter.sh >/etc/almanac/checked-hosts
#
# ok       cli_filter.lua lies beside slurm.conf, every user can read it, and sbatch starts
# absent   it does not, but sbatch starts: this host's slurm.conf does not name lua yet
# broken   sbatch does not start within 30 s, and neither do srun and salloc
# unknown  sbatch or slurm.conf was not found
#
# Exit status: 0 ok, else 1. SLURM_CONF names slurm.conf where it is elsewhere (in a job Slurm may have set it).
host=${SLURMD_NODENAME:-$(uname -n)}
conf=
for path in "$SLURM_CONF" /etc/slurm/slurm.conf /run/slurm/conf/slurm.conf; do
    if [ -z "$conf" ] && [ -f "$path" ]; then conf=$path; fi
done
# sbatch loads the filter before it looks at its options. (srun of 22.05 does not within a job.)
if [ -z "$conf" ] || ! command -v sbatch >/dev/null; then
    status=unknown
elif ! timeout 30 sbatch --help </dev/null >/dev/null 2>&1; then
    status=broken
else
    case $(stat -Lc %A "${conf%/*}/cli_filter.lua" 2>/dev/null) in
    -??????r*) status=ok ;;
    *) status=absent ;;
    esac
fi
printf '%s %s %s\n' "${host%%.*}" "$status" "$(date +%s)"
[ "$status" = ok ]
