"""A worker writes each item of its answer as a pickle, with the bytes in it beside; large arrays as a whole."""

from __future__ import annotations

import numpy

from moreh_ap.runtime.relay.answers import written_layout, written_once
from moreh_ap.runtime.relay.worker_values import first_answer
from moreh_ap.runtime.relay.written_answers import OTHER, written_result


def test_bytes_lie_beside_the_pickle_of_their_item():
    layout, kind, *parts = written_result([1, (b"loss", b"more"), None])
    assert layout == written_layout([1, 1, 3, 1]) and kind == written_once(b"n3")
    assert written_once(b"loss") in parts and written_once(b"more") in parts and len(parts) == 5
    assert written_result((b"loss",))[0] == written_layout([1, 2]), "a result that is no list is one item"


def test_arrays_and_very_many_parts_are_written_as_a_whole():
    for result in ([numpy.arange(100_000)], [b"%d" % number for number in range(10_000)]):
        layout, part = written_result(result)
        assert layout == written_layout([1]) and part.startswith(written_once(OTHER))
        assert first_answer([layout, part]).status == "done"
