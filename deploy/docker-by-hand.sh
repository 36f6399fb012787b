#!/usr/bin/env bash
# Runs a command with its own Docker daemon, on a Debian machine without a Docker service or access to an image hub.
# Installs the packages, starts dockerd, builds stand-ins for the images of a hub (the base with debootstrap, Prometheus
# from Debian's binaries, a small imitation of Grafana), runs the command, and stops the daemon.
#
#   sudo deploy/docker-by-hand.sh make test-compose
#
# DOCKER_BY_HAND_ROOT: folder in which images and stand-ins are kept between runs (default .cache/docker, some GB).
set -euo pipefail

here="$(cd "$(dirname "$0")/.." && pwd)"
state="${DOCKER_BY_HAND_ROOT:-$here/.cache/docker}"
base="python:3.11-slim-bookworm"
bundle="/etc/ssl/certs/ca-certificates.crt"

die() {
  echo "docker-by-hand: $*" >&2
  exit 1
}

[ $# -gt 0 ] || die "give the command to run, for example $0 make test-compose"
[ "$(id -u)" = 0 ] || die "run it as root: it installs packages and starts dockerd"
command -v apt-get >/dev/null || die "works only on Debian; elsewhere, start a Docker daemon and run the command directly"

packages=()
[ -x /usr/sbin/dockerd ] || packages+=(docker.io iptables)
[ -x /usr/bin/docker-compose ] || packages+=(docker-compose)
[ -x /usr/sbin/debootstrap ] || packages+=(debootstrap)
[ -x /usr/bin/promtool ] || packages+=(prometheus)
if [ ${#packages[@]} -gt 0 ]; then
  echo "docker-by-hand: installing ${packages[*]}"
  # policy-rc.d prevents packages from starting their daemons.
  policy=/usr/sbin/policy-rc.d
  made_policy=
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made_policy=1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  [ -z "$made_policy" ] || rm -f "$policy"
fi

# The socket is in a directory that only root can enter, because access to it is root access to this machine. It is in
# /tmp, because the path of a socket is limited to 107 bytes and the repository's path may be longer.
mkdir -p "$state"
run="$(mktemp -d /tmp/docker-by-hand.XXXXXX)"
export DOCKER_HOST="unix://$run/docker.sock"
export PATH="/usr/bin:/usr/sbin:$PATH"

dockerd --storage-driver="${DOCKER_STORAGE_DRIVER:-overlay2}" --data-root "$state/data" --exec-root "$run/exec" \
  --pidfile "$run/dockerd.pid" --host "$DOCKER_HOST" >"$run/dockerd.log" 2>&1 &
daemon=$!

finish() {
  local status=$?
  trap - EXIT
  kill "$daemon" 2>/dev/null || true
  wait "$daemon" 2>/dev/null || true
  rm -rf "$run"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for _ in $(seq 100); do
  docker version >/dev/null 2>&1 && break
  kill -0 "$daemon" 2>/dev/null || { tail -n 20 "$run/dockerd.log" >&2; die "dockerd exited at start"; }
  sleep 0.3
done
docker version >/dev/null 2>&1 || { tail -n 20 "$run/dockerd.log" >&2; die "dockerd did not answer within 30 s"; }

if ! docker image inspect "$base" >/dev/null 2>&1; then
  echo "docker-by-hand: making a stand-in for $base"
  rootfs="$state/rootfs"
  rm -rf "$rootfs"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$rootfs" >"$run/debootstrap.log" \
    || { tail -n 20 "$run/debootstrap.log" >&2; die "debootstrap failed"; }
  # The host's certificate bundle, so that an index behind a private certificate can be reached during the build.
  [ ! -e "$bundle" ] || cp "$bundle" "$rootfs$bundle"
  rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/*
  tar -C "$rootfs" -c . | docker import - "$base" >/dev/null
  rm -rf "$rootfs"
fi

# stand_in NAME CONTEXT builds a stand-in under the image's name in compose.yaml.
stand_in() {
  local name="$1" context="$2" image
  image="$(sed -n "s|^ *image: \(.*/$name:.*\)|\1|p" "$here/compose.yaml")"
  docker image inspect "$image" >/dev/null 2>&1 && return
  echo "docker-by-hand: making a stand-in for $image"
  DOCKER_BUILDKIT=0 docker build --quiet ${PIP_CERT:+--build-arg PIP_CERT="$PIP_CERT"} --tag "$image" \
    --file "$here/tests/compose/stand_ins/Dockerfile.$name" "$context" >/dev/null
}

mkdir "$run/binaries"
cp /usr/bin/prometheus /usr/bin/promtool "$run/binaries"
stand_in prometheus "$run/binaries"
rm -r "$run/binaries"
stand_in grafana "$here/tests/compose/stand_ins"

"$@"
