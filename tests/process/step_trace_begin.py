"""Importing this module begins the trace of the importing thread. No finalizer of earlier tests runs in it."""

import gc
import sys

from step_trace import OF_THIS_PROCESS

gc.collect()
gc.disable()
sys.setprofile(OF_THIS_PROCESS)
