"""What the end of a script waits for.

Must not know what is being done meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_POLL_S = 0.1
_EXIT_S = 5.0  # how long the end of a script waits


@contextlib.contextmanager
def exit_waits() -> Iterator[None]:
    """Has Python wait, should the script end meanwhile, before it runs exit handlers.

    Monarch registers exit handlers while it is imported and attached to. They would run without our `close`, which has
    to come first, and the next call of the engine would abort. The wait has a limit: an interrupted import may have
    left its lock with the main thread.
    """
    done, main = threading.Event(), threading.main_thread()

    def wait() -> None:  # in a thread that is no daemon, so Python joins it
        while not done.wait(_POLL_S):
            if not main.is_alive():
                done.wait(_EXIT_S)
                return

    threading.Thread(target=wait, name="moreh-exit", daemon=False).start()
    try:
        yield
    finally:
        done.set()
