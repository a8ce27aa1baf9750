#!/bin/sh
# entry.sh ROLE: prepares a container for its role and runs the role's services until it is stopped.
set -eu
role=$1
# Docker's limit can be 2^30: munged and slurmd would spend minutes closing files that are not open.
[ "$(ulimit -n)" -le 16384 ] || ulimit -n 16384
case $role in
dbd) services="munged mariadb slurmdbd" ;;
ctl) services="munged slurmctld almanac" ;;
node | bare-node) services="munged slurmd exporter bmc" ;;
login) services="munged" ;;
prometheus | mail) services=$role ;;
*)
    echo "no role $role: expected dbd, ctl, node, bare-node, login, prometheus or mail" >&2
    exit 2
    ;;
esac

# All hosts share the folder /etc/munge; the first to link its key there has made the cluster's.
if [ ! -e /etc/munge/munge.key ]; then
    (umask 077 && head -c 128 /dev/urandom >"/etc/munge/.$(hostname)" && chown munge: "/etc/munge/.$(hostname)")
    ln "/etc/munge/.$(hostname)" /etc/munge/munge.key 2>/dev/null || true
    rm "/etc/munge/.$(hostname)"
fi
install -d -o munge -g munge /run/munge
install -d -o slurm -g slurm /run/slurm /var/spool/slurmctld /var/log/slurm
install -d /var/spool/slurmd
install -d -o prometheus -g prometheus /var/lib/prometheus/almanac
install -d -o mysql -g mysql /run/mysqld
install -d -m 1777 /run/almanac/profiles
for user in alice bob; do
    install -d -m 700 -o "$user" -g "$user" "/home/$user"
    # All hosts share the homes and do this at once: `install` to one name fails if another host is between its steps.
    install -m 644 -o "$user" -g "$user" /usr/local/share/cluster/train.sh "/home/$user/.train.sh-$(hostname)"
    mv "/home/$user/.train.sh-$(hostname)" "/home/$user/train.sh"
done
# A node on which cli_filter.lua was forgotten: srun fails there.
[ "$role" != bare-node ] || rm -f /etc/slurm/cli_filter.lua
if [ "$role" != "${role%node}" ]; then
    # What slurmd wants behind File= of gres.conf: four more of /dev/null.
    for index in 0 1 2 3; do
        [ -e "/dev/nvidia$index" ] || mknod -m 666 "/dev/nvidia$index" c 1 3
    done
fi

rm -rf /etc/service
mkdir -p /etc/service
for name in $services; do cp -r "/usr/local/share/cluster/services/$name" /etc/service/; done
runsvdir -P /etc/service &
trap 'sv -w 20 force-stop $services >/dev/null; exit 0' TERM INT
wait
