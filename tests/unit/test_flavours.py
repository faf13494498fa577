"""The platform's flavours: names, devices, and the smallest that has enough of them."""

from __future__ import annotations

from moreh_ap.flavours import FLAVOURS, flavour_of


def test_flavours():
    assert all(int(name.split(".")[-1][:-2]) == 64 * devices for name, devices in FLAVOURS.items())
    assert flavour_of(64, 64 * 2**30) == "8xLarge.4096GB"
    assert flavour_of(385, 64 * 2**30) == flavour_of(8, 80 * 2**30) == ""
