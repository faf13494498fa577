"""Which variables of the script's environment its workers on other hosts get.

Decides the list. Must not know how they travel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ALLOWED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "CUBLAS_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
)
"""Settings of libraries that take part in a step, which have to be the same everywhere."""

_SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what the workers of other hosts get of the script's environment; nothing whose name sounds secret."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(ALLOWED_PREFIXES) and not _SECRET.search(name)
    }
