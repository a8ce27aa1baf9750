#!/bin/bash
# packages.sh python|servers|docker
# Makes sure that the Debian packages behind `make demo` (python), the cluster tests (servers) or their docker clusters
# (docker) are there.
# As root it installs what is missing, without starting any service; otherwise it says what is missing.
# Status 1: python or docker packages are missing, or servers are while ALMANAC_REQUIRE_CLUSTER=1.
set -euo pipefail

PYTHON=${PYTHON:-python3}
PYTHON_PACKAGES=(python3 python3-venv libgomp1)
SERVER_PACKAGES=(slurm-wlm slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin
    mariadb-server munge prometheus procps passwd util-linux lua5.1 lua5.4 python3-venv
    logrotate man-db systemd chromium openipmi ipmitool rpm rsync ansible-core python3-torch
    gcc libc6-dev)
# What tests/cluster/layout.py asks for, Prometheus, the Lua of Debian's Slurm and the newest for tests of
# the modules, and what reads the files of the Debian package (systemd is not started), the browser of tests/reports,
# a BMC that speaks IPMI with its client, what builds RPMs, copies advice, and runs the Ansible role, PyTorch, and the
# compiler of a stub of NVML.
SERVER_COMMANDS=(munged mariadbd mariadb-install-db slurmdbd slurmctld slurmd sbatch sacct setpriv useradd prometheus lua5.1 lua5.4
    logrotate man systemd-analyze chromium ipmi_sim ipmitool rpmbuild rsync ansible-playbook gcc)
# docker-cli: newer releases have the client apart from the engine.
DOCKER_PACKAGES=(docker.io docker-cli docker-compose debootstrap iptables iproute2)
POLICY=${POLICY:-/usr/sbin/policy-rc.d}
MARK='# made by packages.sh of almanac' # a killed run's is told from the site's by it
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing_python() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || echo libgomp1
}

missing_servers() {
    local name
    for name in "${SERVER_COMMANDS[@]}"; do
        command -v "$name" >/dev/null || echo "$name"
    done
    /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv # what make deb builds with
    /usr/bin/python3 -c 'import torch' 2>/dev/null || echo python3-torch # what examples/unequal_gpus is tested with
}

missing_docker() {
    local name
    for name in docker dockerd debootstrap iptables ip; do
        command -v "$name" >/dev/null || echo "$name"
    done
    docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || echo docker-compose
}

is_policy_ours() { grep -qsF "$MARK" "$POLICY"; }

restore_policy() {
    if is_policy_ours; then rm "$POLICY"; fi
    if [ -e "$POLICY.almanac-saved" ] && [ ! -e "$POLICY" ]; then mv "$POLICY.almanac-saved" "$POLICY"; fi
}

# The site's policy is put aside until this script ends. One such run at a time: the lock is on the folder.
forbid_services() {
    exec 9<"$(dirname "$POLICY")"
    flock 9
    trap restore_policy EXIT
    # What a killed run put aside stays there, unless the site has made another since.
    if [ -e "$POLICY" ] && ! is_policy_ours; then mv -f "$POLICY" "$POLICY.almanac-saved"; fi
    printf '#!/bin/sh\n%s\nexit 101\n' "$MARK" >"$POLICY.almanac-new"
    chmod 755 "$POLICY.almanac-new"
    mv -f "$POLICY.almanac-new" "$POLICY"
}

# apt-get, but no package's maintainer script starts a service meanwhile.
install_packages() {
    local package known=()
    export DEBIAN_FRONTEND=noninteractive
    for _ in 1 2 3; do
        apt-get -qq update && break
        sleep 3
    done
    for package in "$@"; do # names differ a little between releases
        if apt-cache show "$package" >/dev/null 2>&1; then known+=("$package"); fi
    done
    forbid_services
    apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install -y --no-install-recommends "${known[@]}" >/dev/null 9<&-
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

case ${1:-} in
python) missing=missing_python packages=("${PYTHON_PACKAGES[@]}") is_required=1 ;;
servers) missing=missing_servers packages=("${SERVER_PACKAGES[@]}") is_required=${ALMANAC_REQUIRE_CLUSTER:-0} ;;
docker) missing=missing_docker packages=("${DOCKER_PACKAGES[@]}") is_required=1 ;;
*)
    echo "usage: $0 python|servers|docker" >&2
    exit 2
    ;;
esac

if [ -n "$($missing)" ] && can_install; then
    echo "installing ${packages[*]}"
    # What counts is whether the files are there, which is looked at below.
    install_packages "${packages[@]}" || echo "apt-get did not succeed"
fi
absent=$($missing | tr '\n' ' ')
if [ -n "$absent" ]; then
    echo "missing: ${absent}(as root: apt-get install ${packages[*]})" >&2
    if [ "$is_required" = 1 ]; then exit 1; fi
fi
if [ "$1" = servers ] && { [ -n "$absent" ] || [ "$(id -u)" != 0 ]; }; then
    echo "tests/cluster will be skipped: real Slurm, MariaDB and Prometheus servers need root and their packages" >&2
fi
