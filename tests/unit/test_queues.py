"""The waiting queue: a heap by a static key, from which anything can be taken at any time."""

from collections.abc import Iterable
from random import Random
from weakref import WeakSet

import pytest
from scheduler_drive import request

from scheduler.queues import WaitingQueue
from scheduler.sequence import Sequence


class Watched(Sequence):
    """One whose end a test can see."""

    __slots__ = ("__weakref__",)


def waiting(arrival: int, priority: int = 0) -> Watched:
    return Watched(request(str(arrival), [1], priority=priority), arrival, 4)


def by_priority(sequences: Iterable[Sequence] = ()) -> WaitingQueue:
    queue = WaitingQueue(lambda sequence: sequence.request.priority)
    for sequence in sequences:
        queue.push(sequence)
    return queue


def drain(queue: WaitingQueue) -> list[int]:
    """Take the head until nothing is left; the arrivals in that order."""
    order = []
    while (head := queue.head()) is not None:
        order.append(head.arrival)
        queue.remove(head)
    return order


def test_an_empty_queue_has_no_head() -> None:
    queue = by_priority()
    assert (queue.head(), len(queue), list(queue)) == (None, 0, [])


def test_the_lowest_key_comes_first_and_ties_go_by_arrival() -> None:
    priorities = {4: 2, 0: 2, 3: 1, 1: 1, 2: 9}
    queue = by_priority(waiting(arrival, priority) for arrival, priority in priorities.items())
    assert drain(queue) == [1, 3, 0, 4, 2]


def test_the_head_stays_until_it_is_removed() -> None:
    one, two = waiting(0), waiting(1)
    queue = by_priority([one, two])
    assert queue.head() is one
    assert queue.head() is one
    assert len(queue) == 2
    queue.remove(one)
    assert queue.head() is two


def test_anything_can_be_removed_from_anywhere() -> None:
    sequences = [waiting(arrival) for arrival in range(6)]
    queue = by_priority(sequences)
    for arrival in (3, 5, 0):
        queue.remove(sequences[arrival])
        assert sequences[arrival] not in queue
    assert len(queue) == 3
    assert all(sequences[arrival] in queue for arrival in (1, 2, 4))
    assert drain(queue) == [1, 2, 4]


def test_iteration_is_in_order_of_entry() -> None:
    queue = by_priority(waiting(arrival, -arrival) for arrival in range(4))
    assert [sequence.arrival for sequence in queue] == [0, 1, 2, 3]
    assert drain(queue) == [3, 2, 1, 0]


def test_what_is_not_here_can_not_be_removed() -> None:
    one, two = waiting(0), waiting(1)
    queue = by_priority([one])
    with pytest.raises(KeyError):
        queue.remove(two)
    queue.remove(one)
    with pytest.raises(KeyError):
        queue.remove(one)
    assert (len(queue), queue.head()) == (0, None)


def test_one_that_left_can_come_again_to_its_place() -> None:
    sequences = [waiting(arrival) for arrival in range(4)]
    queue = by_priority(sequences)
    for _ in range(3):
        queue.remove(sequences[2])
        queue.push(sequences[2])
    assert len(queue) == 4
    assert drain(queue) == [0, 1, 2, 3]


def filled(count: int) -> tuple[WaitingQueue, list[Watched], WeakSet[Watched]]:
    """A queue, its members by arrival, and those of them that somebody still holds."""
    members = [waiting(arrival) for arrival in range(count)]
    return by_priority(members), members, WeakSet(members)


def test_corpses_are_let_go_before_they_prevail() -> None:
    queue, members, alive = filled(1000)
    while len(queue) > 10:
        queue.remove(members.pop())
        # Never more than one dead for each living one, and a few.
        assert len(alive) <= 2 * len(queue) + 64
    assert drain(queue) == list(range(10))


def test_corpses_of_a_short_queue_are_let_go_when_it_is_asked() -> None:
    queue, members, alive = filled(50)
    while members:
        queue.remove(members.pop())
    assert queue.head() is None
    assert len(alive) == 0


def test_ten_thousand_come_out_in_order_whatever_leaves_between() -> None:
    random = Random(7)
    sequences = [waiting(arrival, random.randrange(100)) for arrival in range(10_000)]
    random.shuffle(sequences)
    queue = by_priority(sequences)
    gone = set(random.sample(sequences, 7_000))
    for sequence in gone:
        queue.remove(sequence)
    assert len(queue) == 3_000
    stay = sorted((s.request.priority, s.arrival) for s in sequences if s not in gone)
    assert drain(queue) == [arrival for _, arrival in stay]
    assert (len(queue), queue.head()) == (0, None)
