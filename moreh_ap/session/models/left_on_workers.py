"""What forwards do on the workers that the script does not see: attributes that they set there, and warnings.

Decides which of it the script is told, and once. Must not know why an attribute did not come with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moreh_ap.session import script_line


class LeftOnWorkers:
    """What is to be told of the forwards of one model.

    Args:
        model_name: What the script calls the model's class.

    Attributes:
        names: Attributes that forwards have set on the workers only since the script was last told, in their order.
        warnings: What else workers did, with the class of its warning, in order.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name, self._told = model_name, set[str]()
        self.names: dict[str, None] = {}
        self.warnings: dict[str, type[Warning]] = {}

    def note(self, names: Iterable[str], warnings: Iterable[str] = ()) -> None:
        """Records attributes that a forward set and that did not come to the controller, or not in time; warnings."""
        self.names.update(dict.fromkeys(names))
        self.warnings.update(dict.fromkeys(warnings, UserWarning))

    def tell(self, known: Iterable[str], copy: Callable[[list[str]], set[str]], *, silently: bool) -> None:
        """Has the script find each attribute as a copy, where it can be copied, else warns of it; all of this once.

        Args:
            known: Attributes that the script sets itself, by hooks.
            copy: Copies attributes into the script; returns the names of those that could be.
            silently: Whether neither is wanted.
        """
        texts = {text: kind for text, kind in self.warnings.items() if text not in self._told}
        names = [name for name in self.names if name not in {*self._told, *known}]
        self._told.update(names, self.warnings)
        self.names.clear()
        self.warnings.clear()
        if silently:
            return
        for text, kind in texts.items():
            script_line.warn(text, kind)
        copied = copy(names) if names else set()
        left = [name for name in names if name not in copied]
        if left:
            script_line.warn(
                f"forward() of {self._model_name} sets {', '.join(left)} in the workers; in the script "
                "the attribute stays what it was. Return the value from forward(), or register it as a buffer. "
                "See: docs/limits.md#models"
            )
