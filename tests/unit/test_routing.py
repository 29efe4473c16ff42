from scheduler.ids import NodeId
from scheduler.routing import least_loaded

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_the_node_with_the_fewest_requests_is_taken() -> None:
    assert least_loaded([A, B, C], {A: 2, B: 1, C: 3}, turn=0) == B


def test_ties_go_round_by_turn() -> None:
    load = {A: 0, B: 0, C: 1}
    assert [least_loaded([A, B, C], load, turn) for turn in range(4)] == [A, B, A, A]


def test_one_node_serves_everything() -> None:
    assert {least_loaded([A], {A: 9}, turn) for turn in range(3)} == {A}
