#!/bin/bash
# base-image.sh SUITE...
# Makes the Dockerfile's base image debian:SUITE-slim with debootstrap, for machines that can pull none. Root.
set -euo pipefail
SCRIPTS=/usr/share/debootstrap/scripts

make_image() {
    local suite=$1 script=$SCRIPTS/$1 root
    root=$(mktemp -d)
    trap 'rm -rf "$root"' RETURN
    # debootstrap knows a suite by a script of its name; what is newer than it is made as sid is.
    [ -e "$script" ] || script=$SCRIPTS/sid
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" "" "$script"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
    # A mirror may hold a release in the making past its date.
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/90mirror"
    printf 'path-exclude /usr/share/%s/*\n' doc man locale >"$root/etc/dpkg/dpkg.cfg.d/90slim"
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - "debian:$suite-slim" >/dev/null
    echo "made debian:$suite-slim"
}

if [ $# = 0 ]; then
    echo "usage: $0 SUITE..." >&2
    exit 2
fi
for suite in "$@"; do make_image "$suite"; done
