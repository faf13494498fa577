"""Every thread of the script means the accelerator by "cuda", and so does code of the script that a backward runs."""

from __future__ import annotations

import threading

import torch

from moreh_ap.device import function_mode
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Enter the function mode in this thread, in each that is started later, and around each backward."""
    group = patches.group("A function mode belongs to one thread, and is off while it handles a call (`backward`).")
    mode = function_mode.RedirectMode()
    mode.__enter__()
    group.note(
        "torch.overrides.TorchFunctionMode",
        'One on the stack of this thread gives "cuda" its meaning in every call of PyTorch.',
        lambda: function_mode.remove_mode(mode),
    )

    def start(thread: threading.Thread) -> None:
        """Starts a thread whose `run` is inside the function mode."""
        attributes = vars(thread)
        run, own = thread.run, {"run": attributes["run"]} if "run" in attributes else {}

        def restore() -> None:
            attributes.pop("run", None)
            attributes.update(own)

        def run_in_mode() -> None:
            restore()
            with function_mode.RedirectMode():
                run()

        attributes["run"] = run_in_mode
        try:
            original_start(thread)
        except BaseException:
            restore()
            raise

    original_start = group.replace(threading.Thread, "start", start)

    run_backward = function_mode.in_mode(torch.autograd._engine_run_backward)
    group.replace(torch.autograd, "_engine_run_backward", run_backward, "Runs hooks and functions of the script in it.")
