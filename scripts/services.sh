#!/usr/bin/env bash
# System packages that `make test-real` uses. Installed only by root; without them their tests skip, or fail in CI.
set -euo pipefail
command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing redis-server ..."
  apt-get update -qq
  # RUNLEVEL=1: the tests start a server of their own; none is to be left running.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null
else
  echo "redis-server is not installed (on Debian: apt-get install redis-server); its tests skip" >&2
fi
