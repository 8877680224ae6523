"""Whose turn it is: counted by hand."""

import pytest

from segattn.scheduler import NeuronPolicy, Request
from segattn.scheduler.turns import Turns


def requests(names: str) -> list[Request]:
    return [Request(name, [1], 9) for name in names]


def due(turns: Turns) -> bool:
    return turns.decodes_are_due


def served(turns: Turns, decodes: list[Request]) -> str:
    return "".join(request.request_id for request in turns.decodes_of_a_step(decodes))


def test_decodes_are_due_after_so_many_prefills_for_so_many_steps() -> None:
    turns = Turns(NeuronPolicy(max_consecutive_prefills=2, max_consecutive_decodes=3), 8)
    turns.note_prefill(4)
    assert not due(turns)
    turns.note_prefill(4)
    for _ in range(3):
        assert due(turns)
        turns.note_decode()
    assert not due(turns)
    # The count of prefills began anew.
    turns.note_prefill(4)
    assert not due(turns)


def test_an_empty_step_between_prefills_does_not_forget_the_first() -> None:
    turns = Turns(NeuronPolicy(max_consecutive_prefills=2), 8)
    turns.note_prefill(1)
    turns.note_empty(is_stuck=False)
    assert not due(turns)
    turns.note_prefill(1)
    assert due(turns)


@pytest.mark.parametrize(
    ("max_decodes", "num_running", "num_steps"), [(2, 5, 6), (2, 4, 4), (8, 5, 2), (1, 0, 2)]
)
def test_a_turn_serves_every_decode_as_often(
    max_decodes: int, num_running: int, num_steps: int
) -> None:
    turns = Turns(NeuronPolicy(max_consecutive_prefills=1, max_consecutive_decodes=2), max_decodes)
    turns.note_prefill(num_running)
    for _ in range(num_steps):
        assert due(turns)
        turns.note_decode()
    assert not due(turns)


def test_a_stuck_prefill_gives_one_step_to_the_decodes() -> None:
    turns = Turns(NeuronPolicy(max_consecutive_prefills=None), 8)
    turns.note_prefill(1)
    assert not due(turns)
    turns.note_empty(is_stuck=True)
    assert due(turns)
    turns.note_decode()
    assert not due(turns)
    turns.note_empty(is_stuck=True)
    turns.note_prefill(1)
    assert not due(turns)


def test_decodes_beyond_the_budget_take_turns() -> None:
    turns = Turns(NeuronPolicy(), 2)
    decodes = requests("abcde")
    steps = [served(turns, decodes) for _ in range(5)]
    assert steps == ["ab", "cd", "ae", "bc", "ad"]
    # A newcomer has waited longest, then "e"; who fits is served whatever was before.
    assert served(turns, [*decodes, *requests("f")]) == "ef"
    assert served(turns, decodes[:2]) == "ab"


def test_the_literal_policies_leave_the_choice_to_the_scheduler() -> None:
    assert served(Turns(NeuronPolicy.documented(), 2), requests("abcde")) == "abcde"


def test_a_budget_for_no_row_serves_one() -> None:
    assert served(Turns(NeuronPolicy(), 0), requests("ab")) == "a"
