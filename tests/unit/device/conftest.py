"""Has "cuda" mean the accelerator, without workers, while a test of this folder runs."""

from __future__ import annotations

import pytest

from moreh_ap.device import function_mode
from moreh_ap.device.worker_backend import IN_FORCE
from moreh_ap.session.calls import autograd_api


@pytest.fixture(autouse=True)
def redirected():
    IN_FORCE.backend = autograd_api  # all that these tests ask of a backend are its gradient functions
    mode = function_mode.RedirectMode()
    mode.__enter__()
    yield
    function_mode.remove_mode(mode)
    IN_FORCE.backend = None
