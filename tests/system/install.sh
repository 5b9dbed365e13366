#!/bin/sh
# Installs what the system tests need and this machine lacks; a tool that cannot be had is an error.
set -eu
python=$1

missing=
for pair in dockerd:docker.io docker:docker.io iptables:iptables ip:iproute2 mmdebstrap:mmdebstrap chromium:chromium; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "make system needs root and:$missing (Debian: apt-get install$missing)" >&2
        exit 1
    fi
    echo "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086  # one word a package
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
"$python" -m pip install --quiet -r "$(dirname "$0")/requirements.txt"
