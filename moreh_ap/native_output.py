"""Lines that native code of other libraries prints, kept from the user's terminal.

Decides how a line is caught. Must not know which library prints it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without_lines(beginning: str) -> Iterator[None]:
    """Keeps the lines that begin like this and that are printed on file descriptor 2 inside, and passes on all others.

    Args:
        beginning: How the lines begin.
    """
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            caught.seek(0)
            for line in caught:
                if not line.startswith(beginning.encode()):
                    os.write(kept, line)
            os.close(kept)
