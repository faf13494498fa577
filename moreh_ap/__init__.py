"""One line turns a script for one GPU into one that trains on every device: nothing else of it changes.

Decides what exists after a bare `import torch`: the name `torch.moreh`, and the old `AdamW` in transformers. Runs
inside every `import torch` of every process, so it imports nothing heavy and must not know how an accelerator works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moreh_ap.version import __version__ as __version__

if TYPE_CHECKING:
    from moreh_ap.session.checkpoint.training_checkpoint import load as load
    from moreh_ap.session.checkpoint.training_checkpoint import save as save


def __getattr__(name: str) -> Any:
    """Returns `save` or `load`, imported when first asked for."""
    if name in ("save", "load"):
        from moreh_ap.session.checkpoint import training_checkpoint

        return getattr(training_checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _autoload() -> None:
    """Makes `torch.moreh` and, where the environment asks for it, does what the one line does.

    Called at the end of `import torch`, through the entry point that `moreh` declares. Calling it again is harmless.
    """
    import os
    import sys

    import moreh
    from moreh_ap.integrations import transformers_import

    torch = sys.modules["torch"]
    torch.moreh = moreh  # type: ignore[attr-defined]
    transformers_import.install()
    if os.environ.get("MOREH_ENABLE_ADVANCED_PARALLELIZATION", "").strip() not in ("", "0"):
        from moreh_ap import option

        option.enable_where_asked(os.environ)
