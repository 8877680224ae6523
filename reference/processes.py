"""Child processes that end with their parent."""

import os
import signal
import threading
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """Initializer of a pool's processes: Ctrl-C is the parent's, and a dead parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
