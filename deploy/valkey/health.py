"""Exits with 0 when the Valkey of this container answers."""

import socket
from pathlib import Path

password = Path("/run/secrets/valkey_password").read_bytes().rstrip(b"\r\n")
with socket.create_connection(("127.0.0.1", 6379), 2) as valkey, valkey.makefile("rb") as replies:
    valkey.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\nPING\r\n" % (len(password), password))
    assert [replies.readline(), replies.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
