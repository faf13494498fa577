"""Numbers of states of a model's settings."""

from __future__ import annotations

from moreh_ap.protocol.model_settings import Settings


def test_a_state_that_comes_back_has_its_number():
    settings = Settings()
    assert settings.number == 0
    numbers = [settings.set({"off": value, "other": 1}) for value in (True, False, True, False)]
    assert numbers == [1, 2, 1, 2]
    assert settings.set({"more": b"x"}) == 3
    assert len({settings.set({"count": value}) for value in range(10_000)}) == 10_000
