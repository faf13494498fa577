"""Importing this module ends the trace of the importing thread, and writes it down."""

import gc
import os
import sys

from step_trace import OF_THIS_PROCESS, result_file

sys.setprofile(None)
gc.enable()
result_file(os.getpid()).write_text("\n".join(OF_THIS_PROCESS.files))
