"""Runs several scripts of `tutorials/manual` one after the other in the processes of one torchrun.

    torchrun --nproc-per-node 2 manual_in_turn.py RUNS.json

RUNS.json is a list of [port, words]: where the processes of a run meet, and its command line, beginning with the path
of a script. torchrun's own store serves one run only.
"""

import json
import os
import runpy
import sys
from pathlib import Path

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
for port, words in json.loads(Path(sys.argv[1]).read_text()):
    os.environ["MASTER_PORT"] = str(port)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as `python script` has it
    runpy.run_path(words[0], run_name="__main__")
    sys.path.pop(0)
