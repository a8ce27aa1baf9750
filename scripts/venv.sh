#!/bin/bash
# venv.sh FOLDER: an environment with exactly the locked versions (checked by hash) and this checkout, editable.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=$1

# pip would write into the environment of another checkout.
if [ -L "$VENV" ]; then
    echo "error: $VENV is a symbolic link to $(readlink "$VENV"); a folder of this checkout is expected" >&2
    echo "try: rm $VENV, then make again" >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$PYTHON is $("$PYTHON" -V 2>&1 || echo missing); Python >= 3.11 is needed (set PYTHON=...)" >&2
    exit 1
fi
# An environment whose interpreter is gone cannot be mended.
if [ -e "$VENV" ] && ! "$VENV/bin/python" -c '' 2>/dev/null; then rm -rf "$VENV"; fi
[ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
"$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
