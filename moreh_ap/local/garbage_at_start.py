"""Garbage collection while a script starts: older objects are left out.

Decides which objects the collector looks at. Must not know what a script does.

[Note: older objects]
`import torch` leaves some 170,000 objects that live as long as the process. What a script imports and builds later has
the collector look at all objects of the process several times, for 0.1 s and more each. Here the objects that are older
than the one line are left out (`gc.freeze`) until a model is called for the second time. From then on the collector
looks at all of them, so that what the script drops is freed.
"""

from __future__ import annotations

import gc


class _OlderObjects:
    are_left_out = False


_OLDER_OBJECTS = _OlderObjects()


def leave_out_older_objects() -> None:
    """Leaves all objects out of later collections; does nothing where the script has left some out itself."""
    if not gc.get_freeze_count():
        gc.freeze()
        _OLDER_OBJECTS.are_left_out = True


def include_older_objects() -> None:
    """Has later collections look at all objects again."""
    if _OLDER_OBJECTS.are_left_out:
        gc.unfreeze()
        _OLDER_OBJECTS.are_left_out = False
