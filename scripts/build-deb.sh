#!/bin/bash
# build-deb.sh OUTDIR: builds the Debian package slurm-almanac for this Debian and this machine, from the tree it lies in.
# It needs /usr/bin/python3 with python3-venv, dpkg-deb and pip's configured index; nothing of this tree is changed.
# The same tree and the same SOURCE_DATE_EPOCH give the same package.
set -euo pipefail
umask 022

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
mkdir -p "$1"
OUT=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."
PYTHON=/usr/bin/python3 # the one that the package depends on
HOME_DIR=/opt/slurm-almanac
WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/slurm-almanac.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
ROOT=$WORK/root
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
unset PYTHONPATH PYTHONHOME

"$PYTHON" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' ||
    { echo "$0: needs $PYTHON 3.11 or newer, with the package python3-venv" >&2; exit 1; }
# The newest change of the tree; without git, of what says the version.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    SOURCE_DATE_EPOCH=$(git -c safe.directory='*' log -1 --format=%ct 2>/dev/null || stat -c %Y almanac/__init__.py)
fi
export SOURCE_DATE_EPOCH

# Tools in one environment, the program in another that has not even pip.
install_program() {
    "$PYTHON" scripts/lock_subset.py build-system click-man >"$WORK/tools.txt"
    "$PYTHON" scripts/lock_subset.py runtime >"$WORK/runtime.txt"
    "$PYTHON" -m venv "$WORK/tools"
    "$PYTHON" -m venv --without-pip "$ROOT$HOME_DIR"
    local pip=("$WORK/tools/bin/python" -m pip --quiet)
    "${pip[@]}" install --require-hashes -r "$WORK/tools.txt"
    "${pip[@]}" --python "$ROOT$HOME_DIR/bin/python" install --no-compile --require-hashes -r "$WORK/runtime.txt"
    "${pip[@]}" wheel --no-deps --no-build-isolation -w "$WORK/wheel" .
    "${pip[@]}" --python "$ROOT$HOME_DIR/bin/python" install --no-compile --no-deps "$WORK"/wheel/*.whl
}

# What is needed to test, to build on or to look into libraries; what names the folder they were built in; compiled again.
trim_program() {
    local site=$1
    find "$site" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
    rm -rf "$site"/pyarrow/{include,src} "$site"/*.dist-info/{direct_url.json,REQUESTED,INSTALLER,RECORD}
    find "$site/pyarrow" "$site/pandas" "$site/scipy" "$site/numpy" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' \
        -o -name '*.h' -o -name '*.lib' -o -name '*.a' \) -delete
    find "$ROOT$HOME_DIR/bin" -mindepth 1 ! -name 'python*' -delete
    rm -rf "$ROOT$HOME_DIR/include" "$ROOT$HOME_DIR/lib64"
    printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\nexecutable = %s\n' \
        "$("$PYTHON" -c 'import platform; print(platform.python_version())')" "$PYTHON" >"$ROOT$HOME_DIR/pyvenv.cfg"
    "$PYTHON" -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$ROOT" -p / "$site"
}

# -I: a user's PYTHONPATH, PYTHONHOME and current folder do not matter.
write_commands() {
    local bin=$ROOT$HOME_DIR/bin
    printf '#!%s/bin/python -I\nfrom cli.main import main\n\nmain()\n' "$HOME_DIR" >"$bin/almanac"
    mkdir -p "$ROOT/usr/bin"
    ln -s "$HOME_DIR/bin/almanac" "$ROOT/usr/bin/almanac"
    sed "1s|.*|#!$HOME_DIR/bin/python -I|" slurm_hooks/submit/sbatch_almanac.py >"$bin/sbatch-almanac"
    ln -s "$HOME_DIR/bin/sbatch-almanac" "$ROOT/usr/bin/sbatch-almanac"
    mkdir -p "$ROOT/usr/sbin"
    for wanted in on off; do
        printf '#!%s/bin/python -I\nfrom cli.power_programs import main\n\nmain("%s")\n' "$HOME_DIR" $wanted \
            >"$bin/almanac-power-$wanted"
        ln -s "$HOME_DIR/bin/almanac-power-$wanted" "$ROOT/usr/sbin/almanac-power-$wanted"
        chmod 755 "$bin/almanac-power-$wanted"
    done
    chmod 755 "$bin/almanac" "$bin/sbatch-almanac"
}

copy_files() {
    local share=$ROOT/usr/share hooks=slurm_hooks system=slurm_hooks/system
    install -Dm644 -t "$share/almanac/lua" $hooks/lua/*.lua
    install -Dm644 -t "$share/almanac/slurm" $hooks/standalone/*.lua
    install -Dm644 -t "$share/almanac/exporter" $hooks/exporter/*.csv
    install -Dm644 -t "$share/almanac/grafana" $system/grafana/*.json
    install -Dm755 -t "$ROOT/usr/libexec/almanac" $hooks/prolog/almanac-gpus.sh $hooks/spool/almanac-ended.sh \
        $hooks/nodes/almanac-cli-filter.sh
    install -Dm644 -t "$ROOT/usr/lib/systemd/system" $system/systemd/*
    install -Dm644 $system/tmpfiles.conf "$ROOT/usr/lib/tmpfiles.d/slurm-almanac.conf"
    install -Dm644 $system/sysusers.conf "$ROOT/usr/lib/sysusers.d/slurm-almanac.conf"
    install -Dm644 $system/logrotate "$ROOT/etc/logrotate.d/slurm-almanac"
    install -Dm644 $system/almanac.toml "$ROOT/etc/almanac/almanac.toml"
    install -Dm644 $system/cron "$share/doc/slurm-almanac/examples/cron.d-slurm-almanac"
    install -Dm644 -t "$share/doc/slurm-almanac" CHANGELOG.md README.md docs/*.md
    install -Dm644 scripts/debian/copyright -t "$share/doc/slurm-almanac"
    PYTHONPATH="$SITE" "$WORK/tools/bin/python" scripts/manual.py "$WORK/manual"
    install -Dm644 -t "$share/man/man1" "$WORK"/manual/man1/*.1 scripts/debian/sbatch-almanac.1
    install -Dm644 -t "$share/man/man8" scripts/debian/almanac-power-off.8
    gzip -9n "$share"/man/man1/*.1 "$share"/man/man8/*.8
    ln -s almanac-power-off.8.gz "$share/man/man8/almanac-power-on.8.gz"
    install -Dm644 "$WORK/manual/completions/almanac" -t "$share/bash-completion/completions"
    install -Dm644 "$WORK/manual/completions/_almanac" -t "$share/zsh/vendor-completions"
}

write_control() {
    local minor next version
    minor=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    next=${minor%.*}.$((${minor#*.} + 1))
    version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' almanac/__init__.py | sed 's/\.dev/~dev/; s/\(a\|b\|rc\)\([0-9]\)/~\1\2/')
    mkdir -p "$ROOT/DEBIAN"
    sed -e "s/@VERSION@/$version+py$minor/" -e "s/@ARCH@/$(dpkg --print-architecture)/" -e "s/@MINOR@/$minor/" \
        -e "s/@NEXT@/$next/" -e "s/@SIZE@/$(du -k --apparent-size -s "$ROOT" | cut -f1)/" \
        scripts/debian/control >"$ROOT/DEBIAN/control"
    (cd "$ROOT" && find etc -type f -printf '/%p\n' | sort) >"$ROOT/DEBIAN/conffiles"
    install -m755 -t "$ROOT/DEBIAN" scripts/debian/{postinst,prerm,postrm}
    (cd "$ROOT" && find opt usr -type f -print0 | sort -z | xargs -0 md5sum) >"$ROOT/DEBIAN/md5sums"
}

install_program
SITE=$("$ROOT$HOME_DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
trim_program "$SITE"
write_commands
copy_files
write_control
# Some installed files are newer than the tree: mkdir and pip made them now.
find "$ROOT" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0r touch -h -d "@$SOURCE_DATE_EPOCH"
dpkg-deb --root-owner-group -Zzstd -z6 --build "$ROOT" "$OUT" >/dev/null
PACKAGE=$(ls -t "$OUT"/slurm-almanac_*.deb | head -1)
printf '%s\n' "$PACKAGE"
printf 'package %s MiB, installed %s MiB, %s files\n' "$(($(stat -c %s "$PACKAGE") >> 20))" \
    "$(du -sm --apparent-size "$ROOT" | cut -f1)" "$(find "$ROOT" -type f ! -path '*/DEBIAN/*' | wc -l)"
printf 'outside %s:\n' "$HOME_DIR"
(cd "$ROOT" && find . \( -type f -o -type l \) ! -path './opt/*' ! -path './DEBIAN/*' | sort | sed 's/^\./  /')
