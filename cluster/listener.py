"""The socket that the API listens on."""

import socket
from ipaddress import ip_address

BACKLOG = 1024


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises OSError with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only on sockets that name their protocol; with it on, an answer's second
    # write waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"can't listen on {host}:{port}: {error.strerror}; choose another --port") from None
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`. A name other than localhost may be any address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_door(host: str) -> str:
    """What to tell the user of an API that listens on `host` without keys."""
    return (
        f"prelay: warning: the API listens on {host} without an API key, so everybody who reaches it can use it."
        " Give --api-key, PRELAY_API_KEY or the setting api_keys_file, or listen on 127.0.0.1."
    )
