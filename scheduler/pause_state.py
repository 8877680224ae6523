"""How much of the work a paused scheduler still takes on."""

from enum import IntEnum


class PauseState(IntEnum):
    """Argument of `set_pause_state`; the values are vLLM's."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Running requests go on, nothing is admitted."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""
