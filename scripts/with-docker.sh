#!/bin/bash
# with-docker.sh COMMAND...
# Runs COMMAND with the docker cluster's images there for each release that ALMANAC_SITES names, by the Docker engine
# that runs, or by one of its own, whose data (images too) lie in /var/tmp/almanac-docker. It stops what it starts.
# ALMANAC_SITES is "native" where it is not set, under ALMANAC_REQUIRE_CLUSTER=1 "native,24.11,26.05".
# Where there can be no docker cluster it says why, and COMMAND runs with ALMANAC_SITES=native; under
# ALMANAC_REQUIRE_CLUSTER=1 nothing does, and the status is 1.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
ROOT=$(realpath -ms "${ALMANAC_DOCKER_ROOT:-/var/tmp/almanac-docker}")
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
declare -A SUITES=([22.05]=bookworm [24.11]=trixie [26.05]=forky)

[ $# -gt 0 ] || { echo "usage: $0 COMMAND..." >&2; exit 2; }
command=("$@")

give_up() {
    echo "no docker cluster: $1" >&2
    if [ "${ALMANAC_REQUIRE_CLUSTER:-0}" = 1 ]; then exit 1; fi
    echo "the tests run on the native Slurm only" >&2
    ALMANAC_SITES=native "${command[@]}"
    exit
}

stop_engine() {
    [ -z "${engine:-}" ] || { kill "$engine" && wait "$engine"; } 2>/dev/null || true
}

# The folder's name is known to everybody who may write beside it: only one that is root's alone is used.
make_root() {
    mkdir -p "$(dirname "$ROOT")"
    mkdir -m 700 "$ROOT" 2>/dev/null || true
    [ -n "$(find "$ROOT" -maxdepth 0 -type d -uid 0 ! -perm /022)" ] ||
        give_up "$ROOT is a link, not root's, or others may write to it: remove it"
    chmod 700 "$ROOT"
}

start_engine() {
    local waited
    # Packets of containers leave by the default route: its MTU is theirs.
    dockerd --data-root "$ROOT/data" --exec-root "$ROOT/exec" --pidfile "$ROOT/pid" --host "$DOCKER_HOST" \
        --mtu "$(cat "/sys/class/net/$(ip route show default | sed -n '1s/.* dev \([^ ]*\).*/\1/p')/mtu" || echo 1500)" \
        >"$ROOT/log" 2>&1 &
    engine=$!
    trap stop_engine EXIT
    trap 'exit 143' TERM INT
    for waited in {1..60}; do
        if docker info >/dev/null 2>&1; then return; fi
        if ! kill -0 "$engine" 2>/dev/null; then break; fi
        sleep 0.5
    done
    give_up "dockerd did not start (waited $((waited / 2)) s): $(tail -n 3 "$ROOT/log")"
}

if [ -z "${ALMANAC_SITES:-}" ]; then
    if [ "${ALMANAC_REQUIRE_CLUSTER:-0}" != 1 ]; then give_up "only ALMANAC_REQUIRE_CLUSTER=1 or ALMANAC_SITES asks for it"; fi
    export ALMANAC_SITES=native,24.11,26.05
fi
suites=()
for release in ${ALMANAC_SITES//,/ }; do
    if [ "$release" != native ]; then suites+=("${SUITES[$release]:?ALMANAC_SITES names $release}"); fi
done
if [ ${#suites[@]} = 0 ]; then exec "${command[@]}"; fi

[ "$(id -u)" = 0 ] || give_up "it needs root"
scripts/packages.sh docker || give_up "packages are missing"
if ! docker info >/dev/null 2>&1; then
    make_root
    export DOCKER_HOST=unix://$ROOT/socket
    # It may be that of another run, which then stops it.
    docker info >/dev/null 2>&1 || start_engine
fi
docker/build.sh "${suites[@]}" || give_up "the images could not be built"
"${command[@]}"
