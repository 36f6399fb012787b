#!/usr/bin/env bash
# Generates the secrets of compose.yaml and deploy/kubernetes, one file each: CURVE keys of the link, a token of the
# public API (for the tenant `default`), a token of the admin API, the gateway's API key, Grafana's password. Existing
# files are not changed.
#
#   deploy/make-secrets.sh [FOLDER]                     # default: deploy/secrets
#
# `roster keygen` generates the keys: from .venv, from the PATH, or from the image roster-scheduler (built if needed).
set -euo pipefail

here="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$here/deploy/secrets}"
image="$(sed -n 's|^ *image: \(roster-scheduler:.*\)|\1|p' "$here/compose.yaml")"

# Only the owner can enter the folder. The files are readable by all users, because Compose mounts them unchanged into
# containers, where other user ids read them.
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

# make NAME COMMAND... writes the command's output to that file.
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
