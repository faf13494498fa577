"""Saves that are written while the script runs on: one at a time, and the error of one is always raised or printed.

Decides when a save is waited for and where its error is raised: at the next save or load, by `SaveInProgress.result`,
or at the end of the script. Must not know what is saved.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future


class SaveInProgress(Future[None]):
    """A save; `result` waits until it is complete and raises its error."""

    was_told = False

    def result(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            OSError: A file could not be written.
            TimeoutError: That took longer than `timeout` seconds.
        """
        self.exception(timeout)
        self.was_told = True
        return super().result()


_lock = threading.RLock()
_last: SaveInProgress | None = None

awaited: set[str] = set()
"""Prefixes of the paths of files that workers write in the background, until the save has all of them."""


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Waits for the last save of this process, and raises its error if it was not raised; inside, no other one begins.

    Raises:
        Exception: The error of the last save.
    """
    with _lock:
        wait()
        yield


def wait() -> None:
    """Waits for the last save of this process.

    Raises:
        Exception: Its error, if it was not raised before.
    """
    global _last
    last, _last = _last, None
    if last is not None:
        was_told = last.was_told
        try:
            last.result()
        except Exception:
            if not was_told:
                raise
        except BaseException:  # Ctrl-C while waiting: the save is not interrupted
            _last = last
            raise


def run(save: Callable[[], None], *, in_background: bool) -> SaveInProgress:
    """Calls `save`, in a thread if `in_background`; the interpreter does not end before it has returned."""
    global _last
    done = SaveInProgress()
    if not in_background:
        save()
        done.set_result(None)
        return done

    def work() -> None:
        try:
            save()
        except BaseException as error:  # of any class: it is raised in the script's thread
            done.set_exception(error)
        else:
            done.set_result(None)

    _last = done
    atexit.unregister(_end)
    atexit.register(_end)  # before the workers end: they were made before
    threading.Thread(target=work, name="moreh-save").start()
    return done


def _end() -> None:
    """At the end of the script, prints the error of the last save and makes the script's exit status 1."""
    try:
        wait()
    except Exception:
        print("The last moreh_ap.save(..., background=True) of this script failed:", file=sys.stderr)
        traceback.print_exc()
        atexit.unregister(_end)
        atexit._run_exitfuncs()  # the others; no exit status can be given to the interpreter from here on
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
