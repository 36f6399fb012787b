#!/usr/bin/env bash
# Makes what compose.yaml and deploy/kubernetes read as secrets, one file each: CURVE keys of the link, a token of the
# public API (of a tenant `default`), one of the admin API, the gateway's API key, Grafana's password. Files that are
# there stay as they are.
#
#   deploy/make-secrets.sh [FOLDER]                     # by default deploy/secrets
#
# `roster keygen` makes the keys: from .venv, from the PATH, or from the image roster-scheduler (built if need be).
set -euo pipefail

here="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$here/deploy/secrets}"
image="roster-scheduler:0.1.0"

# Only the owner enters the folder. The files themselves can be read by all: Compose hands them to containers as they
# are, where users of other numbers read them.
umask 022
install -d -m 700 "$folder"
folder="$(cd "$folder" && pwd)"

keygen() {
  [ ! -e "$folder/$1.key" ] || return 0
  if [ -x "$here/.venv/bin/roster" ]; then
    (cd "$folder" && "$here/.venv/bin/roster" keygen "$1")
  elif command -v roster >/dev/null; then
    (cd "$folder" && roster keygen "$1")
  else
    docker image inspect "$image" >/dev/null 2>&1 || docker build -f "$here/deploy/Dockerfile.scheduler" -t "$image" "$here"
    docker run --rm --user "$(id -u):$(id -g)" --volume "$folder:/secrets" --workdir /secrets "$image" roster keygen "$1"
  fi
  chmod 644 "$folder/$1.key"
}

random() {
  head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'
}

# make NAME COMMAND...: the command's output becomes that file.
make() {
  local file="$folder/$1"
  shift
  [ -e "$file" ] || "$@" >"$file"
}

keygen scheduler
keygen runner
make runners cat "$folder/runner.pub"
make tokens echo "default $(random)"
make admin_tokens echo "operator $(random)"
make gateway_key random
make grafana_password random
echo "secrets are in $folder"
