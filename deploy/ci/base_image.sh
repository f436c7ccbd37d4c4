#!/usr/bin/env bash
# Makes python:3.11-slim-bookworm out of Debian's own packages, for a machine that reaches no image registry: base_image.sh TAG
# It stands in for the official image, with Debian's Python 3.11 in its place. Needs root, mmdebstrap and a running engine.
set -euo pipefail
tag=${1:?the tag to import the image as}
certificates=/etc/ssl/certs/ca-certificates.crt

tarball=$(mktemp /var/tmp/forebay-base.XXXXXX.tar)
trap 'rm -f "$tarball"' EXIT

hooks=(
  # As in the official image: `python` is there, and pip installs into it.
  'ln -sf python3 "$1/usr/bin/python"'
  'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED'
  # pip and apt inside builds trust whom this machine trusts.
  'mkdir -p "$1/usr/local/share/ca-certificates"'
  'cp -r /usr/local/share/ca-certificates/. "$1/usr/local/share/ca-certificates"'
  'chroot "$1" update-ca-certificates >/dev/null'
)
mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  "${hooks[@]/#/--customize-hook=}" bookworm "$tarball"
docker import -c "ENV PIP_CERT=$certificates SSL_CERT_FILE=$certificates" -c 'CMD ["python3"]' "$tarball" "$tag" >/dev/null
