#!/bin/bash
# build-rpm.sh OUTDIR: builds the RPM packages slurm-almanac and slurm-almanac-client, from the same trees and maintainer
# scripts as build-deb.sh. It needs rpmbuild and what scripts/stage-packages.sh needs. ALMANAC_STAGE names a tree that
# stage-packages.sh made before. Both need the Python, C library, and machine that they were built with: build them on
# the EL release that they are for.
set -euo pipefail
umask 022

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
command -v rpmbuild >/dev/null || { echo "$0: needs rpmbuild (Debian: rpm; EL: rpm-build)" >&2; exit 1; }
mkdir -p "$1"
OUT=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."
STAGE=${ALMANAC_STAGE:-}
if [ -z "$STAGE" ]; then
    STAGE=$(mktemp -d "${TMPDIR:-/var/tmp}/slurm-almanac.XXXXXX")
    trap 'rm -rf "$STAGE"' EXIT
    scripts/stage-packages.sh "$STAGE"
fi
STAGE=$(realpath "$STAGE")
TOP=$STAGE/rpm
rm -rf "$TOP"
mkdir -p "$TOP"
SOURCE_DATE_EPOCH=$(cat "$STAGE/epoch")
export SOURCE_DATE_EPOCH
# EL has several Pythons, and python3 may be an older one: the packages name theirs.
PYTHON=$(readlink -f "$(cat "$STAGE/python")")
MINOR=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

scriptlet() { # NAME FILE ARGUMENT [CONDITION]: a maintainer script of the Debian package
    printf '%%%s\n%sset -- %s\n' "$1" "${4:+$4 || exit 0
}" "$3"
    tail -n +2 "scripts/debian/$2"
}

# Debian purges, and RPM does not: what was made at run time stays, but for the timers, which end.
scriptlets() { # PACKAGE
    scriptlet post "$1.postinst" configure
    scriptlet preun "$1.prerm" remove '[ "$1" = 0 ]'
    scriptlet postun "$1.postrm" remove '[ "$1" = 0 ]'
}

own_folders() { # ROOT: folders that no other package has
    (cd "$1" && find . -mindepth 1 -type d -printf '/%P\n') | grep -E '^/(opt/slurm-almanac|usr/share/almanac|usr/libexec/almanac|etc/almanac|usr/share/doc/slurm-almanac[^/]*)(/|$)' |
        sed 's/.*/%dir "&"/'
}

files() { # ROOT
    own_folders "$1"
    (cd "$1" && find . ! -type d -printf '/%P\n') | sed -e 's|/zsh/vendor-completions/|/zsh/site-functions/|' \
        -e 's/.*/"&"/' -e 's|^"/etc/|%config(noreplace) "/etc/|'
}

build() { # ROOT PACKAGE PAYLOAD
    local spec=$TOP/$2.spec
    sed -e "s/@VERSION@/$(cat "$STAGE/version")/" -e "s/@MINOR@/$MINOR/" -e "s|@PYTHON@|$PYTHON|" -e "s|@ROOT@|$1|" \
        "scripts/rpm/$2.spec" >"$spec"
    scriptlets "$2" >>"$spec"
    { printf '%%files\n%%defattr(-,root,root,-)\n'; files "$1" | sort -u; } >>"$spec"
    rpmbuild -bb --quiet --define "_topdir $TOP" --define "_tmppath $TOP" --define "_rpmdir $OUT" \
        --define '_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' \
        --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' \
        --define '_buildhost almanac' --define 'debug_package %{nil}' --define '__os_install_post %{nil}' \
        --define '_build_id_links none' --define "_binary_payload $3" --define '_dbpath /nonexistent' "$spec"
}

build "$STAGE/client" slurm-almanac-client w19.zstdio
build "$STAGE/full" slurm-almanac w3.zstdio
rm -rf "$TOP"
ls -1 "$OUT"/slurm-almanac*.rpm
