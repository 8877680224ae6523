"""Run the state machine until something fails or the time is over."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from .machine import Campaign, SchedulerMachine, machine
from .shrink import NotReproducedError, shrink
from .subject import Subject
from .trial import Finding

from hypothesis import HealthCheck, Phase, seed, settings  # isort: skip - after machine
from hypothesis.stateful import run_state_machine_as_test  # isort: skip - the same

RUNS_PER_ROUND = 20
EVENTS_PER_RUN = 40


def run_round(machine_class: type[SchedulerMachine], number: int) -> None:
    """Some runs of a machine; the same number gives the same runs. Raises what a run raises."""
    run_state_machine_as_test(
        seed(number)(machine_class),
        settings=settings(
            max_examples=RUNS_PER_ROUND,
            stateful_step_count=EVENTS_PER_RUN,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


def campaign_until(
    campaign: Campaign,
    seconds: float,
    first_round: int = 0,
    tell: Callable[[float], None] = lambda elapsed: None,
) -> int | None:
    """Run rounds until the time is over, at least one; the round that failed, if one did.

    ValueError when no configuration fits the fixed part.
    """
    start, number = time.monotonic(), first_round
    machine_class = machine(campaign)
    while number == first_round or time.monotonic() - start < seconds:
        try:
            run_round(machine_class, number)
        except Exception:  # any failure of the scheduler under test is the finding
            if campaign.failure is None:
                raise
            return number
        if not campaign.num_runs and campaign.refusal is not None:
            raise campaign.refusal
        number += 1
        tell(time.monotonic() - start)
    return None


def fuzz(
    subject: Subject,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    rules: str = "invariants",
    config: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Finding | None:
    """Random runs until the time is over, at least 20; the first failure, shrunk.

    A failure that does not happen again is returned as it was.
    """
    campaign = Campaign(subject, rules, config or {}, policy or {})
    campaign_until(campaign, seconds, seed)
    if campaign.failure is None:
        return None
    try:
        return shrink(campaign.failure)
    except NotReproducedError:
        return campaign.failure
