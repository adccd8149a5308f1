#!/usr/bin/env bash
# Makes .venv with everything `make` needs. Safe to run again; picks up where it failed.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

python=$(find_python)
if [ -z "$python" ]; then
  echo "afield needs Python 3.11 or newer; none was found. Install one, or say which: make PYTHON=/path/to/python" >&2
  exit 2
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing the venv module ..."
    apt-get update -qq
    apt-get install -y -qq "$(basename "$(readlink -f "$(command -v "$python")")")-venv"
  else
    echo "$python has no venv module: install it (on Debian: apt-get install python3-venv)" >&2
    exit 2
  fi
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
  echo "making .venv with $("$python" --version) ..."
  rm -rf .venv
  "$python" -m venv .venv
fi

# Sandboxes are made with bubblewrap; without it their tests skip, and the rest works.
if ! command -v bwrap >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing bubblewrap ..."
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; } ||
    echo "bubblewrap was not installed; --runtime sandbox needs it" >&2
fi

echo "installing afield and what it needs into .venv (a few minutes the first time) ..."
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip "$@"; }
# torch first and pinned: left to a resolver it may bring gigabytes of CUDA libraries to a laptop without a GPU.
echo "  torch ..."
pip install -q -c constraints.txt torch
echo "  afield, its extras and the development tools ..."
pip install -q -c constraints.txt -e '.[dev]'
# xgrammar alone: it asks for Triton (0.3 GB), which it needs on a GPU only. Last, so that pip does not report Triton as missing.
pip install -q -c constraints.txt --no-deps apache-tvm-ffi xgrammar
touch .venv/.ready
echo "ready: .venv/bin/afield"
