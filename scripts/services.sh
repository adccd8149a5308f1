#!/usr/bin/env bash
# System packages that `make test-real` uses. Installed only by root; without them their tests skip, or fail in CI.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
need redis-server redis-server
need bwrap bubblewrap
need chromium-headless-shell chromium-headless-shell fonts-dejavu-core
need nginx nginx
need podman podman runc netavark aardvark-dns catatonit iptables
need mmdebstrap mmdebstrap gpg libdpkg-perl libdistro-info-perl
[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]} ..."
  apt-get update -qq
  # RUNLEVEL=1: the tests start servers of their own; none is to be left running.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "not installed: ${missing[*]} (on Debian: apt-get install ${missing[*]}); their tests skip" >&2
fi
