#!/bin/bash
# stage-packages.sh DIR [libraries]: makes the trees of both packages, for build-deb.sh and build-rpm.sh.
#   DIR/client   slurm-almanac-client: the program with click, rich, msgspec, ClusterShell, and the collector's
#                prometheus_client and nvidia-ml-py, and what every host of a cluster needs
#   DIR/full     slurm-almanac: the program's libraries, and what only almanac's own host needs
#   DIR/version, DIR/python, DIR/epoch   what the packages are built with
# Needs a Python of 3.11 or newer with venv ($PYTHON, or the first in /usr/bin), and pip's configured index. It changes
# nothing in this tree. The same tree and the same SOURCE_DATE_EPOCH give the same files.
set -euo pipefail
umask 022

[ $# = 1 ] || [ "$#${2:-}" = 2libraries ] || { echo "usage: $0 DIR [libraries]" >&2; exit 2; }
mkdir -p "$1"
STAGE=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."
HOME_DIR=/opt/slurm-almanac
CODE_DIR=/usr/share/almanac/python
CLIENT=$STAGE/client
FULL=$STAGE/full
WORK=$STAGE/work
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
unset PYTHONPATH PYTHONHOME

find_python() {
    local found
    for found in ${PYTHON:-/usr/bin/python3 /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11}; do
        if "$found" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$found"
            return
        fi
    done
    echo "$0: needs Python 3.11 or newer in /usr/bin, with venv (Debian: python3-venv; EL 9: python3.11)" >&2
    exit 1
}

PYTHON=$(find_python)
PIP=("$WORK/tools/bin/python" -m pip --quiet)

# Tools in one environment, the libraries in another without pip.
install_libraries() {
    "$PYTHON" scripts/lock_subset.py build-system click-man >"$WORK/tools.txt"
    "$PYTHON" scripts/lock_subset.py runtime >"$WORK/runtime.txt"
    "$PYTHON" -m venv "$WORK/tools"
    "$PYTHON" -m venv --without-pip "$FULL$HOME_DIR"
    "${PIP[@]}" install --require-hashes -r "$WORK/tools.txt"
    "${PIP[@]}" --python "$FULL$HOME_DIR/bin/python" install --no-compile --require-hashes -r "$WORK/runtime.txt"
}

# The program and what all commands use beside.
install_program() {
    "$PYTHON" scripts/lock_subset.py only click clustershell msgspec nvidia-ml-py prometheus-client rich >"$WORK/client.txt"
    "${PIP[@]}" wheel --no-deps --no-build-isolation -w "$WORK/wheel" .
    "${PIP[@]}" install --no-compile --no-deps --target "$CLIENT$CODE_DIR" --require-hashes -r "$WORK/client.txt"
    # rich uses these for Markdown and source text, which no command prints, and on Windows.
    rm -rf "$CLIENT$CODE_DIR"/{[Pp]ygments,markdown_it,mdurl}*
    rm -f "$CLIENT$CODE_DIR"/{rich/{markdown,syntax,traceback,_win32_console,_windows_renderer}.py,click/testing.py}
    # Of prometheus_client only pages are made, not read; of nvidia-ml-py only the library is needed.
    rm -rf "$CLIENT$CODE_DIR"/{example.py,prometheus_client/{aiohttp,bridge,django,twisted,parser.py,multiprocess.py,openmetrics/parser.py}}
    # Of ClusterShell only lists of hosts are used, which need no YAML.
    rm -rf "$CLIENT$CODE_DIR"/{[Pp]y[Yy][Aa][Mm][Ll]*,yaml,_yaml,bin,etc,share,ClusterShell/{CLI,Worker,Engine,{Communication,Gateway,Propagation,Task,Topology}.py}}
    "${PIP[@]}" install --no-compile --no-deps --target "$CLIENT$CODE_DIR" "$WORK"/wheel/*.whl
}

# Files for tests and for building on libraries; files that name the build folder. What stays is compiled.
trim() { # ROOT SITE
    find "$2" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
    rm -rf "$2"/*.dist-info/{direct_url.json,REQUESTED,INSTALLER,RECORD}
    "$PYTHON" -m compileall -q -j 0 --invalidation-mode unchecked-hash -p / -s "$1" "$2"
}

trim_libraries() {
    local site=$1
    rm -rf "$site"/pyarrow/{include,src}
    # pbr, which sushy needs, names setuptools, and uses it only to build packages.
    rm -rf "$site"/{setuptools,setuptools-*,pkg_resources,_distutils_hack,distutils-precedence.pth}
    find "$site/pyarrow" "$site/pandas" "$site/scipy" "$site/numpy" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' \
        -o -name '*.h' -o -name '*.lib' -o -name '*.a' \) -delete
    find "$FULL$HOME_DIR/bin" -mindepth 1 ! -name 'python*' -delete
    rm -rf "$FULL$HOME_DIR/include" "$FULL$HOME_DIR/lib64"
    printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\nexecutable = %s\n' \
        "$("$PYTHON" -c 'import platform; print(platform.python_version())')" "$PYTHON" >"$FULL$HOME_DIR/pyvenv.cfg"
    # Relative, so that it also holds where the packages are only unpacked.
    echo "../../../../..$CODE_DIR" >"$site/slurm-almanac.pth"
    trim "$FULL" "$site"
}

trim_program() {
    rm -rf "$CLIENT$CODE_DIR"/bin
    find "$CLIENT$CODE_DIR/msgspec" -name '*.pyi' -delete
    trim "$CLIENT" "$CLIENT$CODE_DIR"
    move_compiled
}

# The client stays small: of compiled modules it gets those that its own commands import. It lacks the
# simulator, the generated site, and what only operators run.
LIGHT='cli.advise cli.jobs cli.report reports.job.answer reports.job.conclusions cli.distribute cli.doctor.main cli.install_hooks
    cli.mail reports.mail.recipients
    slurm_hooks.advice.shown slurm_hooks.install.scripts slurm_hooks.install.guarded_line
    slurm_hooks.restart.wrapper slurm_hooks.advice.kinds slurm_hooks.submit.prompt
    slurm_hooks.submit.late_proposals slurm.commands
    slurm.sbatch telemetry.collector.main telemetry.collector.nvml telemetry.collector.jobs'
move_compiled() {
    local file
    # shellcheck disable=SC2086 # words
    "$PYTHON" -IS - "$CLIENT$CODE_DIR" $LIGHT >"$WORK/light" <<'PROGRAM'
import importlib
import sys

sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
for module in list(sys.modules.values()):
    if getattr(module, "__cached__", None):
        print(module.__cached__, module.__file__, sep="\n")
PROGRAM
    { find "$CLIENT$CODE_DIR" -name '*.pyc' | grep -vxFf "$WORK/light"
      find "$CLIENT$CODE_DIR"/{simulator,demo,telemetry/{characterize,attribution,metrics,power}} \
          "$CLIENT$CODE_DIR"/{advisor/{types,power,duration,waits,mig,watch,health},reports/site} \
          "$CLIENT$CODE_DIR"/slurm_hooks/{mig,nodes,power,types,watch,system/grafana} \
          -type f ! -name '*.pyc' | grep -vxFf "$WORK/light"; } | while read -r file; do
        mkdir -p "$FULL$(dirname "${file#"$CLIENT"}")"
        mv "$file" "$FULL${file#"$CLIENT"}"
    done
    find "$CLIENT$CODE_DIR" -type d -empty -delete
}

# -I: a user's PYTHONPATH, PYTHONHOME, and current folder do not matter. -S: neither do the system's libraries. -B: root
# leaves no compiled files, which a removal would not find.
write_program() { # FILE SHEBANG LINE...
    mkdir -p "$(dirname "$1")"
    printf '%s\n' "#!$2" "${@:3}" >"$1"
    chmod 755 "$1"
}

write_commands() {
    local light="$PYTHON -BIS" path="sys.path.insert(0, \"$CODE_DIR\")" wanted
    write_program "$FULL$HOME_DIR/bin/almanac" "$HOME_DIR/bin/python -I" 'from cli.main import main' '' 'main()'
    write_program "$CLIENT/usr/libexec/almanac/almanac-client" "$light" \
        'import sys' '' "$path" 'from cli.main import main' '' 'main()'
    install -Dm755 scripts/packages/almanac -t "$CLIENT/usr/bin"
    sed -e "1s|.*|#!$light|" -e "0,/^import sys\$/s|^import sys\$|import sys\n\n$path|" \
        slurm_hooks/submit/sbatch_almanac.py >"$CLIENT/usr/bin/sbatch-almanac"
    chmod 755 "$CLIENT/usr/bin/sbatch-almanac"
    write_program "$CLIENT/usr/libexec/almanac/almanac-prompt" "$light" \
        'import sys' '' "$path" 'from slurm_hooks.submit.prompt import main' '' 'main()'
    write_program "$CLIENT/usr/bin/almanac-restart" "$light" \
        'import sys' '' "$path" 'from slurm_hooks.restart.wrapper import main' '' 'main()'
    write_program "$CLIENT/usr/sbin/almanac-distribute" "$light" \
        'import sys' '' "$path" 'from cli.distribute import main' '' 'main()'
    write_program "$CLIENT/usr/sbin/almanac-collect" "$light" \
        'import sys' '' "$path" 'from telemetry.collector.main import main' '' 'main()'
    write_program "$CLIENT/usr/bin/almanac-pack" "$light" \
        'import sys' '' "$path" 'from slurm_hooks.packing.launcher import main' '' 'main()'
    mkdir -p "$FULL/usr/sbin"
    for wanted in on off; do
        write_program "$FULL$HOME_DIR/bin/almanac-power-$wanted" "$HOME_DIR/bin/python -I" \
            'from cli.power_programs import main' '' "main(\"$wanted\")"
        ln -s "$HOME_DIR/bin/almanac-power-$wanted" "$FULL/usr/sbin/almanac-power-$wanted"
    done
}

# For every host: the hooks and their programs, the copy of advice, the pages of the commands that work there.
copy_client_files() {
    local share=$CLIENT/usr/share hooks=slurm_hooks system=slurm_hooks/system
    install -Dm644 -t "$share/almanac/lua" $hooks/lua/*.lua
    install -Dm644 -t "$share/almanac/slurm" $hooks/standalone/*.lua
    install -Dm755 -t "$CLIENT/usr/libexec/almanac" $hooks/prolog/almanac-gpus.sh $hooks/spool/almanac-ended.sh \
        $hooks/lua/almanac-cli-filter.sh $system/copy/almanac-copy.sh
    install -Dm644 -t "$CLIENT/usr/lib/systemd/system" $system/copy/almanac-copy.{service,timer}
    install -Dm644 $system/copy/defaults "$CLIENT/etc/default/almanac-copy"
    install -Dm644 -t "$CLIENT/usr/lib/systemd/system" $system/collect/almanac-collect.service
    install -Dm644 $system/collect/defaults "$CLIENT/etc/default/almanac-collect"
    install -Dm644 -t "$share/almanac/restart" $hooks/restart/torch_memory.py
    install -Dm644 -t "$share/almanac/unequal-gpus" examples/unequal_gpus/*.py
    install -Dm644 $system/almanac.toml "$CLIENT/etc/almanac/almanac.toml"
    install -Dm644 -t "$share/doc/slurm-almanac-client" docs/users.md docs/hooks.md docs/install.md docs/configuration.md docs/collector.md \
        scripts/debian/copyright
    install -Dm644 "$WORK/manual/completions/almanac" -t "$share/bash-completion/completions"
    install -Dm644 "$WORK/manual/completions/_almanac" -t "$share/zsh/vendor-completions"
}

copy_full_files() {
    local share=$FULL/usr/share system=slurm_hooks/system
    install -Dm644 -t "$share/almanac/exporter" slurm_hooks/exporter/*.csv
    install -Dm644 -t "$share/almanac/grafana" slurm_hooks/system/grafana/*.json
    install -Dm644 -t "$FULL/usr/lib/systemd/system" $system/systemd/*
    install -Dm644 $system/tmpfiles.conf "$FULL/usr/lib/tmpfiles.d/slurm-almanac.conf"
    install -Dm644 $system/sysusers.conf "$FULL/usr/lib/sysusers.d/slurm-almanac.conf"
    install -Dm644 $system/logrotate "$FULL/etc/logrotate.d/slurm-almanac"
    install -Dm644 $system/cron "$share/doc/slurm-almanac/examples/cron.d-slurm-almanac"
    install -Dm644 -t "$share/doc/slurm-almanac" CHANGELOG.md README.md docs/*.md scripts/debian/copyright
    mkdir -p "$share/doc/slurm-almanac/ansible"
    cp -R --no-preserve=mode,ownership scripts/ansible/. "$share/doc/slurm-almanac/ansible"
}

copy_manual() {
    local client=$CLIENT/usr/share/man full=$FULL/usr/share/man name
    install -Dm644 -t "$full/man1" "$WORK"/manual/man1/*.1
    mkdir -p "$client/man1"
    for name in almanac $("$WORK/tools/bin/python" -c 'from cli.main import CLIENT_COMMANDS as names
print(*(f"almanac-{name}" for name in names))'); do
        mv "$full/man1/$name.1" "$client/man1"
    done
    install -Dm644 -t "$client/man1" scripts/debian/sbatch-almanac.1 scripts/debian/almanac-{pack,restart}.1
    install -Dm644 -t "$client/man8" scripts/debian/almanac-{collect,distribute}.8
    install -Dm644 -t "$full/man8" scripts/debian/almanac-power-off.8
    find "$client" "$full" -name '*.[18]' -exec gzip -9n {} +
    ln -s almanac-power-off.8.gz "$full/man8/almanac-power-on.8.gz"
}

mkdir -p "$WORK"
if [ ! -e "$WORK/site" ]; then
    install_libraries
    SITE=$("$FULL$HOME_DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    trim_libraries "$SITE"
    echo "$SITE" >"$WORK/site"
fi
[ $# = 1 ] || exit 0
SITE=$(cat "$WORK/site")
# The newest change of the tree; without git, of the file that holds the version.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    SOURCE_DATE_EPOCH=$(git -c safe.directory='*' log -1 --format=%ct 2>/dev/null || stat -c %Y almanac/__init__.py)
fi
export SOURCE_DATE_EPOCH

install_program
# The manual needs all commands, and so comes before the client loses modules.
PYTHONPATH="$CLIENT$CODE_DIR:$SITE" "$WORK/tools/bin/python" scripts/manual.py "$WORK/manual"
trim_program
write_commands
export PYTHONPATH="$CLIENT$CODE_DIR:$SITE"
copy_client_files
copy_full_files
copy_manual
rm -rf "$WORK"
sed -n 's/^__version__ = "\(.*\)"/\1/p' almanac/__init__.py | sed 's/\.dev/~dev/; s/\(a\|b\|rc\)\([0-9]\)/~\1\2/' >"$STAGE/version"
printf '%s\n' "$PYTHON" >"$STAGE/python"
printf '%s\n' "$SOURCE_DATE_EPOCH" >"$STAGE/epoch"
# Some installed files are newer than the tree: mkdir and pip made them now.
find "$CLIENT" "$FULL" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0r touch -h -d "@$SOURCE_DATE_EPOCH"
