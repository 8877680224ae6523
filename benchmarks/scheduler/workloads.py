"""The workloads of the scheduler benchmark."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from segattn.scheduler.config import SchedulerConfig


@dataclass(frozen=True)
class Workload:
    """Requests given at the start, after `warm` if any; at most `max_steps` timed steps.

    `num_waiting` short requests more are added untimed, `num_arrivals` are timed before each step.
    With `num_aborts` nothing is timed but the calls that end so many, one before each step.
    """

    name: str
    config: SchedulerConfig
    prompts: list[list[int]]
    max_tokens: int
    warm: list[int] | None = None
    """A prompt that runs to its end first, untimed, and fills the prefix cache."""
    num_untimed_steps: int = 0
    """Steps before the timed ones, counted from the one that computes the last prompt."""
    max_steps: int = 1 << 30
    num_waiting: int = 0
    num_arrivals: int = 0
    num_aborts: int = 0
    most_repetitions: int = 1 << 30


def workloads() -> Iterator[Workload]:
    """The lines of the table."""
    for block_size in (16, 128):
        for num_decodes in (1, 8, 256, 1024):
            yield _decodes(num_decodes, block_size)
        yield _prompts(f"8192-token prompts in chunks of 2048, blocks of {block_size}", block_size)
        yield _prompts(
            f"8192-token prompts, all but 16 tokens cached, blocks of {block_size}",
            block_size,
            shared=8192 - 16,
        )
    yield replace(
        _decodes(256, 16, seats=512), name="256 decodes, one arrival in every step", num_arrivals=1
    )
    yield replace(_long_prompt(), name="128k-token prompt, cold")
    yield replace(
        _long_prompt(), name="128k-token prompt, cached", warm=[*_long_prompt().prompts[0]]
    )
    for policy in ("fcfs", "priority"):
        decodes = replace(_decodes(256, 16, policy=policy), num_waiting=100_000, most_repetitions=2)
        yield replace(decodes, name=f"256 decodes, 100,000 waiting, {policy}")
        for num_aborts in (1, 128):
            name = f"{num_aborts} aborted of 256 decodes, 100,000 waiting, {policy}"
            # After so many calls 128 requests are gone in either case.
            yield replace(decodes, name=name, num_aborts=num_aborts, max_steps=128 // num_aborts)


def _long_prompt() -> Workload:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        max_model_len=132_000,
        block_size=16,
        num_blocks=2 * 132_000 // 16,
    )
    prompt = [(j * 7) % 900 + 10 for j in range(128_000)]
    return Workload("", config, [prompt], max_tokens=4)


def _decodes(
    num_decodes: int, block_size: int, seats: int | None = None, policy: str = "fcfs"
) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=seats or num_decodes,
        max_num_batched_tokens=max(2048, num_decodes),
        max_model_len=4096,
        block_size=block_size,
        num_blocks=(seats or num_decodes) * (4096 // block_size) + 2,
        policy=policy,
    )
    prompts = [[(i * 131 + j) % 900 + 10 for j in range(128)] for i in range(num_decodes)]
    return Workload(
        f"{num_decodes} decodes, blocks of {block_size}",
        config,
        prompts,
        max_tokens=3000,
        num_untimed_steps=21,
        max_steps=400 if num_decodes < 100 else 100,
    )


def _prompts(name: str, block_size: int, shared: int = 0) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=16384,
        block_size=block_size,
        num_blocks=8 * (16384 // block_size) + 8192 // block_size + 2,
    )
    stem = [(j * 7) % 900 + 10 for j in range(8192)]
    prompts = [
        stem[:shared] + [(i * 7919 + j * 13) % 50000 + 10 for j in range(8192 - shared)]
        for i in range(24)
    ]
    return Workload(name, config, prompts, max_tokens=4, warm=stem if shared else None)
