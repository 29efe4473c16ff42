import itertools

import pytest

from cluster.gateway import GatewayError, ServiceFailed, TokenOutput
from cluster.token_streams import TokenStream, TokenStreams
from scheduler.events import Output
from scheduler.ids import RequestId
from scheduler.request import FinishReason

R = RequestId("r")


async def tokens_of(stream: TokenStream, count: int) -> list[int]:
    return [(await stream.next(1.0)).token for _ in range(count)]


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))), ids=str)
async def test_tokens_are_read_in_order_whatever_order_they_come_in(arrival: tuple[int, ...]) -> None:
    stream = TokenStream()
    for index in arrival:
        stream.accept(TokenOutput(index, 10 + index))
    assert await tokens_of(stream, 4) == [10, 11, 12, 13]


async def test_a_token_that_comes_twice_is_read_once() -> None:
    stream = TokenStream()
    for index in (0, 0, 1, 0, 2, 2, 1):
        stream.accept(TokenOutput(index, index))
    assert await tokens_of(stream, 3) == [0, 1, 2]
    with pytest.raises(ServiceFailed, match=r"no token for 0\.01 s"):
        await stream.next(0.01)


async def test_a_token_is_not_read_before_those_before_it() -> None:
    stream = TokenStream()
    stream.accept(TokenOutput(1, 1))
    with pytest.raises(ServiceFailed):
        await stream.next(0.01)
    stream.accept(TokenOutput(0, 0))
    assert await tokens_of(stream, 2) == [0, 1]


async def test_an_error_comes_after_the_tokens_so_far() -> None:
    stream = TokenStream()
    stream.accept(TokenOutput(0, 7))
    stream.fail(GatewayError("lost"))
    assert await tokens_of(stream, 1) == [7]
    with pytest.raises(GatewayError, match="lost"):
        await stream.next(1.0)


async def test_outputs_reach_their_own_stream_with_all_they_carry() -> None:
    streams = TokenStreams()
    mine, other = streams.open(R), streams.open(RequestId("other"))
    streams.deliver(
        [
            Output(R, 0, 5, cached_tokens=16),
            Output(RequestId("unknown"), 0, 1),
            Output(RequestId("other"), 0, 9),
            Output(R, 1, 6, FinishReason.STOP),
        ]
    )
    assert await mine.next(1.0) == TokenOutput(0, 5, None, 16)
    assert await mine.next(1.0) == TokenOutput(1, 6, FinishReason.STOP)
    assert await tokens_of(other, 1) == [9]


async def test_a_failed_step_is_an_error_of_ours() -> None:
    streams = TokenStreams()
    stream = streams.open(R)
    streams.deliver([Output(R, 0, None, FinishReason.ERROR)])
    with pytest.raises(ServiceFailed, match="step failed"):
        await stream.next(1.0)


async def test_a_stopping_server_ends_every_stream() -> None:
    streams = TokenStreams()
    mine, other = streams.open(R), streams.open(RequestId("other"))
    streams.fail_all(ServiceFailed("the server is stopping"))
    for stream in (mine, other):
        with pytest.raises(ServiceFailed, match="stopping"):
            await stream.next(1.0)


async def test_closed_streams_take_nothing() -> None:
    streams = TokenStreams()
    streams.open(R)
    assert len(streams) == 1
    streams.close(R)
    streams.close(R)
    streams.deliver([Output(R, 0, 5)])
    streams.fail(R, GatewayError("late"))
    assert len(streams) == 0
