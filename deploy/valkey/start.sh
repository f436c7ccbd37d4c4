#!/bin/sh
# The password goes in by standard input: as an argument every list of processes would show it.
set -eu
file=/run/secrets/valkey_password
[ -s "$file" ] || { echo "$file is empty: without a password anyone on this network could read the queue" >&2; exit 1; }
exec valkey-server /etc/valkey/valkey.conf - <<END
requirepass "$(cat "$file")"
END
