#!/bin/bash
# build-deb.sh OUTDIR: builds the Debian packages slurm-almanac and slurm-almanac-client for this Debian and this machine,
# from the tree it lies in. It needs dpkg-deb and what scripts/stage-packages.sh needs. ALMANAC_STAGE names a tree that
# stage-packages.sh made before. The same tree and the same SOURCE_DATE_EPOCH give the same packages.
set -euo pipefail
umask 022

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
mkdir -p "$1"
OUT=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."
if [ -n "${ALMANAC_STAGE:-}" ]; then
    STAGE=$(realpath "$ALMANAC_STAGE")
else
    STAGE=$(mktemp -d "${TMPDIR:-/var/tmp}/slurm-almanac.XXXXXX")
    trap 'rm -rf "$STAGE"' EXIT
    PYTHON=/usr/bin/python3 scripts/stage-packages.sh "$STAGE" # the one that the packages depend on
fi
SOURCE_DATE_EPOCH=$(cat "$STAGE/epoch")
export SOURCE_DATE_EPOCH
MINOR=$("$(cat "$STAGE/python")" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VERSION=$(cat "$STAGE/version")+py$MINOR

write_control() { # ROOT PACKAGE
    local root=$1 name=$2 script
    rm -rf "$root/DEBIAN"
    mkdir "$root/DEBIAN"
    sed -e "s/@VERSION@/$VERSION/" -e "s/@ARCH@/$(dpkg --print-architecture)/" -e "s/@MINOR@/$MINOR/" \
        -e "s/@NEXT@/${MINOR%.*}.$((${MINOR#*.} + 1))/" \
        -e "s/@SIZE@/$(du -k --apparent-size -s "$root" | cut -f1)/" "scripts/debian/$name.control" >"$root/DEBIAN/control"
    (cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
    for script in postinst prerm postrm; do
        install -m755 "scripts/debian/$name.$script" "$root/DEBIAN/$script"
    done
    (cd "$root" && find . -path ./DEBIAN -prune -o -path ./etc -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) \
        >"$root/DEBIAN/md5sums"
    find "$root/DEBIAN" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    touch -d "@$SOURCE_DATE_EPOCH" "$root"
}

build() { # ROOT PACKAGE ARCHITECTURE COMPRESSION
    local file=$OUT/$2_${VERSION}_$3.deb
    write_control "$1" "$2"
    dpkg-deb --root-owner-group -Zzstd "-z$4" --build "$1" "$file" >/dev/null
    rm -rf "$1/DEBIAN"
    printf '%s\n%s: package %s KiB, installed %s KiB, %s files\n' "$file" "$2" "$(($(stat -c %s "$file") >> 10))" \
        "$(du -sk --apparent-size "$1" | cut -f1)" "$(find "$1" -type f | wc -l)"
}

build "$STAGE/client" slurm-almanac-client "$(dpkg --print-architecture)" 19
build "$STAGE/full" slurm-almanac "$(dpkg --print-architecture)" 6
