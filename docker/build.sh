#!/bin/bash
# build.sh SUITE...: the cluster's image almanac-cluster:SUITE, with a base image made here where none can be pulled.
# This machine's own certificate authorities (/usr/local/share/ca-certificates) are trusted in it, for a network that
# opens TLS traffic. On a machine that reaches the registries without that, `docker compose build` does the same.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."

if [ $# = 0 ]; then
    echo "usage: $0 SUITE..." >&2
    exit 2
fi
rm -f docker/ca.d/*.crt
find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t docker/ca.d {} + 2>/dev/null || true

build() {
    local base=debian:$1-slim
    docker image inspect "$base" >/dev/null 2>&1 || docker pull -q "$base" 2>/dev/null || docker/base-image.sh "$1"
    docker build -q --build-arg "SUITE=$1" -f docker/Dockerfile -t "almanac-cluster:$1" .
}

builds=()
for suite in "$@"; do
    build "$suite" & # at once: much of each is one process
    builds+=($!)
done
for each in "${builds[@]}"; do wait "$each"; done
