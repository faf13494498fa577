"""Has "cuda" mean the accelerator, without workers, as the tests of the device do."""

from unit.device.conftest import redirected

__all__ = ["redirected"]
