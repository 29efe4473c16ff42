"""The API's socket."""

import asyncio
import socket

import pytest

from cluster.listener import listen_on


async def test_answers_are_not_held_back_by_nagle() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen_on("127.0.0.1", 0)
    server = await asyncio.start_server(on_client, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 5)
        writer.close()


def test_a_taken_port_is_named() -> None:
    with listen_on("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port"):
            listen_on("127.0.0.1", port)
