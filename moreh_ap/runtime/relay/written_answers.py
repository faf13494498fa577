"""How a worker writes an answer, in parts of which hosts join those that several of them say.

Decides what is a part. Must not know what the answers mean.
"""

from __future__ import annotations

import pickle

from moreh_ap.protocol.encoding import pack
from moreh_ap.runtime.relay.answers import written_layout, written_once
from moreh_ap.runtime.relay.worker_answer import DONE, Answer, to_wire

ONE, LIST, OTHER = b"1", b"n", b"w"
"""With what the first item of an answer begins: it has one result, a list of results, or is written as a whole."""

_MOST_PARTS = 1 << 12


def written_result(result: object) -> list[bytes]:
    """Returns the result of a command that is done, as it travels; see [Note: columns] in `answers.py`.

    Raises:
        Exception: What pickling the result raises.
    """
    is_list = type(result) is list
    items = result if isinstance(result, list) and is_list else [result]
    parts, layout = [(LIST if is_list else ONE) + b"%d" % len(items)], [1]
    for item in items:
        packed = pack(item, aside_from_bytes=1)
        if packed.buffers or len(parts) + len(packed.aside) >= _MOST_PARTS:
            return written_other(Answer(DONE, pack(result)))
        parts += [packed.pickle, *packed.aside]
        layout.append(1 + len(packed.aside))
    return [written_layout(layout), *map(written_once, parts)]


def written_other(answer: Answer) -> list[bytes]:
    """Returns any answer as it travels, in one part."""
    return [written_layout([1]), written_once(OTHER + pickle.dumps(to_wire(answer), protocol=5))]
