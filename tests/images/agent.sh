#!/usr/bin/env bash
# An image for the tests, without a registry: a small Debian with Python and what afield's base install needs.
# agent.sh PYTHON CONSTRAINTS OUT.tar -- afield itself is mounted, so that a changed line needs no new image.
set -euo pipefail
python=$1 constraints=$2 out=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install -q --disable-pip-version-check --root-user-action ignore --target "$work/site" \
  --python-version 3.11 --only-binary :all: -c "$constraints" msgspec uvicorn
packages=python3-minimal,libpython3.11-stdlib,dash,coreutils,grep,procps,libc-bin
mmdebstrap --quiet --format=tar --variant=extract --include="$packages" --aptopt='Apt::Install-Recommends "false"' \
  --extract-hook='mkdir -p "$1/proc" "$1/sys" "$1/dev" "$1/tmp" "$1/run" "$1/etc" "$1/usr/local/lib/python3.11/dist-packages"' \
  --extract-hook='chmod 1777 "$1/tmp"; ln -sf python3.11 "$1/usr/bin/python3"; ln -sf dash "$1/bin/sh"' \
  --extract-hook="sync-in $work/site /usr/local/lib/python3.11/dist-packages" \
  bookworm "$out.part"
mv "$out.part" "$out"
