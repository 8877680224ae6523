"""A testing kit for schedulers: random work, invariants, comparison, exploration, shrinking.

The scheduler under test is driven through vLLM's interface (`add_request`, `schedule`,
`update_from_output`, `finish_requests`, `reset_prefix_cache`, `set_pause_state`,
`update_draft_token_ids`) and judged by what comes out of it: by the invariants alone, which read
nothing of what it believes about itself, or by the NumPy model of vLLM's scheduler, with which it
must agree field by field. `machine` and `strategies` need Hypothesis (extra `test`).
"""

from typing import Any

from .ledger import Ledger
from .records import InvariantError
from .report import describe, reproducer
from .shrink import shrink
from .subject import KINDS, Subject
from .trial import RULES, Finding, run_events

__all__ = [
    "KINDS",
    "RULES",
    "Finding",
    "InvariantError",
    "Ledger",
    "Subject",
    "describe",
    "fuzz",
    "reproducer",
    "run_events",
    "shrink",
]


def fuzz(subject: Subject, **options: Any) -> Finding | None:
    """See `segattn.scheduler.testing.fuzzing.fuzz`; Hypothesis is imported when it is called."""
    from .fuzzing import fuzz as run

    return run(subject, **options)
