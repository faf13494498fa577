"""Every thread of the script means the accelerator by "cuda", and so does code of the script that a backward runs."""

from __future__ import annotations

import threading

import torch

from moreh_ap.device import function_mode
from moreh_ap.device.patches.registry import Patches


def install(patches: Patches) -> None:
    """Enter the function mode in this thread, in each that is started later, and around each backward."""
    mode = function_mode.RedirectMode()
    mode.__enter__()
    patches.on_undo(lambda: function_mode.remove_mode(mode))

    # A mode belongs to one thread: threads started later enter it for themselves.
    def bootstrap(thread: threading.Thread) -> None:
        with function_mode.RedirectMode():
            start(thread)

    start = patches.replace(threading.Thread, "_bootstrap_inner", bootstrap)

    run_backward = function_mode.in_mode(torch.autograd._engine_run_backward)
    patches.replace(torch.autograd, "_engine_run_backward", run_backward)
