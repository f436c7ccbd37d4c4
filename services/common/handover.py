"""Leaving a port that other processes listen on, too (SO_REUSEPORT), so that no connection is lost. Linux alone.

The kernel gives each new connection to one of the listeners, and resets what waits at one that closes. So a listener first turns deaf to
connections that begin: those are asked for again a second later, when it is gone and another one answers.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

DEAF_SECONDS = 0.2
"""Connections that have begun end their handshake in this time, and are taken up; a round trip to a client may take as long."""
_SO_ATTACH_FILTER = 26
_FLAGS, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12  # of TCP's header: a byte, and bits in it
# Classic BPF, as linux/filter.h has it: (code, jump if true, jump if false, operand).
_DROPS_SYNS = (
    (0x30, 0, 0, _FLAGS),  # load the byte
    (0x54, 0, 0, _SYN_OR_ACK),  # and
    (0x15, 0, 1, _SYN),  # equal?
    (0x06, 0, 0, 0),  # yes: take nothing of the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # no: take all of it
)


def turn_deaf(*ports: int) -> int:
    """From here on this process's listeners on these TCP ports hear of no new connection; the number of them."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in _DROPS_SYNS))
    filter_ = struct.pack("HL", len(_DROPS_SYNS), ctypes.addressof(program))
    num_deaf = 0
    for listener in _listeners():
        with listener:
            if listener.getsockname()[1] in ports:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
                num_deaf += 1
    return num_deaf


def _listeners() -> Iterator[socket.socket]:
    """The process's listening TCP sockets, gRPC's among them, which nothing else hands out. Each by a descriptor of its own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, or closed meanwhile
            copy = socket.socket(fileno=os.dup(int(name)))
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copy
            else:
                copy.close()
