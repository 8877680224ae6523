"""A testing kit for schedulers of one's own: random work, invariants, shrinking, reproducers.

The scheduler under test is driven through vLLM's interface alone (`add_request`, `schedule`,
`update_from_output`, `finish_requests`, `reset_prefix_cache`, `set_pause_state`) and judged by what
comes out of it. What it believes about itself, its queues and its pools, is never read.
"""

from .events import Event, random_config, random_events
from .ledger import InvariantError, Ledger
from .report import describe, reproducer
from .run import Finding, fuzz, run_events, shrink
from .subject import Subject

__all__ = [
    "Event",
    "Finding",
    "InvariantError",
    "Ledger",
    "Subject",
    "describe",
    "fuzz",
    "random_config",
    "random_events",
    "reproducer",
    "run_events",
    "shrink",
]
