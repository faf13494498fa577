"""Importing this module begins the trace of the importing thread."""

import sys

from step_trace import OF_THIS_PROCESS

sys.setprofile(OF_THIS_PROCESS)
