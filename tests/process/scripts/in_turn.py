"""Runs scripts one after another in this process, each as `python SCRIPT ARGUMENTS` begins it.

    python in_turn.py [PLAN]

A line of standard input is a JSON list: the working directory, the path of the script, its arguments. After each
script, how it ended is printed. Where a script's one line asks for no plan, it gets PLAN.
"""

import functools
import gc
import json
import os
import runpy
import sys
import traceback

import torch

if len(sys.argv) > 1:
    option = torch.moreh.option
    option.enable_advanced_parallelization = functools.partial(option.enable_advanced_parallelization, plan=sys.argv[1])

for number, line in enumerate(sys.stdin, start=1):
    folder, *sys.argv = json.loads(line)
    os.chdir(folder)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        how = "well"
    except SystemExit as exit:
        how = "badly" if exit.code else "well"
    except BaseException:
        traceback.print_exc()
        how = "badly"
    torch.set_default_device(None)  # a script may have set another one, for itself
    gc.collect()
    print(f"\nend of script {number}: {how}", flush=True)
