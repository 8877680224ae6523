"""NeuronPolicy, the arithmetic of admission, and the reasons that waiting requests are given."""

import sys
from dataclasses import FrozenInstanceError

import pytest

from segattn.scheduler import Admission, NeuronPolicy, PauseState, Request, RequestError
from segattn.scheduler.phases import is_prefill
from segattn.scheduler.policy import draft_tokens_in_flight, num_tokens_to_hold
from segattn.tests.scheduler.engine import Engine, neuron, prompt


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("design", "mine"),
        ("max_consecutive_decodes", 0),
        ("max_consecutive_decodes", None),
        ("kv_admission", "best_case"),
        ("max_consecutive_prefills", 0),
        ("max_consecutive_prefills", 1.5),
        ("max_consecutive_prefills", True),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*must be"):
        NeuronPolicy(**{name: value})  # type: ignore[arg-type]  # the wrong kinds are the test


def test_a_published_design_has_no_options() -> None:
    with pytest.raises(ValueError, match="design='shipped': has kv_admission='worst_case'"):
        NeuronPolicy("shared", None, design="shipped")


def test_a_policy_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        NeuronPolicy().kv_admission = "reserved"  # type: ignore[misc]  # what it refuses


@pytest.mark.parametrize(
    ("computed", "num_prompt", "known", "expected"),
    [
        (0, 4, 4, True),
        (3, 4, 4, True),
        (4, 4, 4, False),
        (4, 4, 5, False),
        # Resumed with 3 outputs: positions 4 and 5 are recomputed, 6 is the next decode.
        (4, 4, 7, True),
        (6, 4, 7, False),
    ],
)
def test_prefill_ends_where_one_known_token_is_left(
    computed: int, num_prompt: int, known: int, expected: bool
) -> None:
    assert is_prefill(computed, num_prompt, known) is expected


@pytest.mark.parametrize(
    ("num_drafts", "lookahead", "expected"),
    # Prompt 5 and 6 outputs: 10 rows, the last token is never written; drafts and lookahead reach
    # further, and all ends at max_model_len - 1, or at max_model_len with lookahead.
    [(0, 0, 10), (3, 0, 13), (3, 3, 16), (6, 0, 15), (6, 3, 16)],
)
def test_rows_to_hold_count_drafts_and_lookahead_up_to_the_model_length(
    num_drafts: int, lookahead: int, expected: int
) -> None:
    assert num_tokens_to_hold(5, 6, 16, num_drafts, lookahead) == expected


def test_two_steps_of_drafts_are_in_flight_when_asynchronous() -> None:
    assert (draft_tokens_in_flight(3, False), draft_tokens_in_flight(3, True)) == (3, 6)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_reserved_admission_counts_what_each_request_can_need(
    asynchronous: bool, num_speculative_tokens: int
) -> None:
    # 12 usable blocks of 4; a prompt of 4 with 4 outputs holds 7 rows, 2 blocks; with 2 drafts 9 or
    # 11 rows, 3 blocks. Six of the one or four of the other fit; max_model_len allows only one.
    scheduler = neuron(
        NeuronPolicy(kv_admission="reserved", max_consecutive_prefills=None),
        asynchronous=asynchronous,
        max_num_seqs=8,
        max_model_len=48,
        num_blocks=13,
        num_speculative_tokens=num_speculative_tokens,
    )
    engine = Engine(scheduler, depth=1)
    for number in range(8):
        engine.add(f"r{number}", prompt(4, 10 * number), 4)
    # Prefills come first, so none of these has decoded and ended yet.
    fitting = 4 if num_speculative_tokens else 6
    for _ in range(fitting + 1):
        engine.step()
    assert len(scheduler.running) == fitting
    reasons = [Admission.KV_BLOCKS, *[Admission.BEHIND] * (7 - fitting)]
    assert list(scheduler.waiting_reasons().values()) == reasons
    assert scheduler.max_kv_concurrent == 1


def test_each_waiting_request_has_a_reason_and_reasons_are_counted() -> None:
    scheduler = neuron(
        NeuronPolicy(max_consecutive_prefills=2), max_num_seqs=3, max_num_batched_tokens=4
    )
    engine = Engine(scheduler)
    for name in "ABCDE":
        engine.add(name, prompt(4), 30)
    expected = [
        Admission.PREFILL_BATCH,
        Admission.PREFILL_BATCH,
        Admission.DECODE_TURN,
        Admission.PREFILL_BATCH,
        Admission.MAX_NUM_SEQS,
    ]
    num_behind = 0
    for reason in expected:
        engine.step()
        head, *others = scheduler.waiting_reasons().values()
        assert head is reason
        assert others == [Admission.BEHIND] * len(others)
        num_behind += len(others)
    counts = {reason: count for reason, count in scheduler.admission_counts.items() if count}
    assert counts == {
        Admission.PREFILL_BATCH: 3,
        Admission.DECODE_TURN: 1,
        Admission.MAX_NUM_SEQS: 1,
        Admission.BEHIND: num_behind,
    }
    assert not scheduler.rules.can_schedule(next(iter(scheduler.waiting)))


def test_a_prompt_in_chunks_is_the_reason_that_others_wait() -> None:
    scheduler = neuron(max_num_batched_tokens=4)
    engine = Engine(scheduler)
    engine.add("long", prompt(12), 2)
    engine.add("next", prompt(4), 2)
    engine.step()
    engine.step()
    assert scheduler.waiting_reasons() == {"next": Admission.PREFILL_RUNNING}


def test_the_base_says_why_it_did_not_start_a_request_that_it_could_see() -> None:
    scheduler = neuron(NeuronPolicy.documented())
    Engine(scheduler).add("a", prompt(4), 2)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.waiting_reasons() == {"a": Admission.PAUSED}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_is_refused_when_its_drafts_in_flight_do_not_fit(asynchronous: bool) -> None:
    # Prompt 4 and 4 outputs: 7 rows, and 2 drafts of one step or of two.
    num_rows = 4 + 4 - 1 + 2 * (2 if asynchronous else 1)
    for num_blocks in (num_rows, num_rows + 1):  # blocks of one token, one of them the null block
        scheduler = neuron(
            asynchronous=asynchronous,
            block_size=1,
            num_blocks=num_blocks,
            num_speculative_tokens=2,
        )
        request = Request("a", prompt(4), 4)
        if num_blocks > num_rows:
            scheduler.add_request(request)
        else:
            with pytest.raises(RequestError, match=f"needs {num_rows} KV blocks, the cache has"):
                scheduler.add_request(request)


@pytest.mark.parametrize("num_outputs", [2, 3])
def test_decodes_get_no_turn_when_their_last_token_is_in_flight(num_outputs: int) -> None:
    scheduler = neuron(
        NeuronPolicy(max_consecutive_prefills=1), asynchronous=True, max_num_batched_tokens=4
    )
    engine = Engine(scheduler, depth=2)
    engine.add("a", prompt(4), num_outputs)
    engine.add("b", prompt(40, 100), 1)
    steps = [engine.step() for _ in range(5)]
    # One token of "a" comes with its prompt and one with each turn; then it has none left.
    turns = [{"a": 1}, {"b": 4}] * (num_outputs - 1)
    assert steps == [{"a": 4}, *turns, *[{"b": 4}] * 5][:5]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_phases_advance_within_the_limit(limit: int, asynchronous: bool) -> None:
    scheduler = neuron(
        NeuronPolicy(max_consecutive_prefills=limit),
        asynchronous=asynchronous,
        max_num_batched_tokens=4,
    )
    engine = Engine(scheduler, depth=2 if asynchronous else 1)
    engine.add("D", prompt(4), 40)
    engine.step()
    for number in range(3):
        engine.add(f"long{number}", prompt(36, 100 * number), 1)
    steps = ["D" in engine.step() for _ in range(24)]
    pattern = [*[False] * limit, True]
    # The first prefill of D itself counts.
    assert steps == (pattern * 24)[1:25]


def test_the_plugin_names_what_is_missing_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "segattn.scheduler.vllm_plugin", raising=False)
    with pytest.raises(ImportError, match=r"needs vLLM 0.24 or newer, extra 'vllm'"):
        import segattn.scheduler.vllm_plugin  # noqa: F401  # the import is the test
