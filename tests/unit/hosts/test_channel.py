"""Messages between the controller and an agent."""

from __future__ import annotations

import io

import pytest

from moreh_ap.hosts.channel import Channel, ChannelError


def sent(*messages) -> io.BytesIO:
    written = io.BytesIO()
    channel = Channel(io.BytesIO(), written)
    for kind, payload, values in messages:
        channel.send(kind, payload, **values)
    return io.BytesIO(written.getvalue())


@pytest.mark.parametrize("num_bytes", [0, 1, 65536, 200_000])
def test_messages_arrive_in_order_with_their_bytes(num_bytes):
    payload = bytes(range(256)) * (num_bytes // 256) + b"\n" * (num_bytes % 256)
    channel = Channel(sent(("output", payload, {"rank": 3}), ("end", b"", {})), io.BytesIO())
    first, second = channel.receive(), channel.receive()
    assert (first.kind, first.payload, first.values) == ("output", payload, {"rank": 3})
    assert (second.kind, second.payload, second.values) == ("end", b"", {})
    assert channel.receive() is None


def test_half_a_message_is_the_end():
    whole = sent(("output", b"0123456789", {})).getvalue()
    assert Channel(io.BytesIO(whole[:-1]), io.BytesIO()).receive() is None


@pytest.mark.parametrize(
    "said", [b"Welcome to node1!\n", b"[1]\n", b'{"kind": "x"}\n', b'{"kind": "x", "bytes": -1}\n',
             b'{"kind": "x", "bytes": 99999999999}\n']
)  # fmt: skip
def test_what_a_login_shell_prints_is_no_message(said):
    with pytest.raises(ChannelError):
        Channel(io.BytesIO(said), io.BytesIO()).receive()
