"""What is recorded of a run, and the file that has it.

Decides the names in the JSON, and which variables of the environment it may have. Must not know how figures are found,
nor how the page shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moreh_ap.errors import OptionError

FORMAT = 1
"""Version of the JSON; a page is made only of files with this one."""

RECORD_FILE, PAGE_FILE, TRACE_FILE = "report.json", "report.html", "trace.json"
LINK = "docs/report.md"

SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
)
_OURS, _MASKED = "MOREH_", ("HOSTS", "SSH", "KEY", "TOKEN", "SECRET", "PASSWORD")
MASK = "(set)"


@dataclass(frozen=True)
class PlanFigures:
    """One plan with its predictions: seconds of a step, and bytes on the fullest device."""

    plan: str
    seconds: float
    num_bytes: float


@dataclass(frozen=True)
class PlannedModel:
    """A model's plan and why it has it.

    Attributes:
        model: The class of the model.
        chosen: The plan, with its predictions.
        reason: Why it was chosen.
        others: The next plans, best first; none if the script gave the plan.
        parts: What the predicted bytes are made of.
        usable_bytes: What a plan may reserve on a device.
        rows: Rows of the batch that it was chosen for.
    """

    model: str
    chosen: PlanFigures
    reason: str
    others: list[PlanFigures]
    parts: dict[str, float]
    usable_bytes: float
    rows: int


@dataclass(frozen=True)
class Step:
    """One step of the script's first optimizer.

    Attributes:
        seconds: From the end of the step before to its end; None for the first.
        rows: Rows of all training calls in it.
        tokens: Elements of their two-dimensional integer inputs; 0 where a model takes none.
        loss: The mean of what `backward` was called on; None where that was never read or not a number.
    """

    seconds: float | None
    rows: int
    tokens: int
    loss: float | None = None


@dataclass
class RunRecord:
    """Everything that a report shows. Times of day are in ISO format, in UTC.

    Attributes:
        script: How the script was started.
        began, ended: When the accelerator was made, and when this was written.
        ending: "running", "finished", or the error that ended the script.
        devices: Name and bytes of each device.
        peak_bytes: What each device held at most; empty if the workers could not be asked.
        losses_survived: How often others have taken over from lost workers.
        models: The plan of each model.
        steps: Every step.
        slow: What ran slower than it could, with the line of the script.
        warnings: Warnings of this package, with the line of the script.
        log: The lines of the log.
        versions: Of Python and libraries.
        variables: The environment, as far as it may be shown.
        timeline: The spans of one step: name, category, process, lane, milliseconds of begin and of length.
    """

    script: str
    began: str
    ended: str = ""
    ending: str = "running"
    devices: list[dict[str, Any]] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    losses_survived: int = 0
    models: list[PlannedModel] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    slow: list[dict[str, str]] = field(default_factory=list)
    warnings: list[dict[str, str]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns the record as the text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"


def read(file: Path) -> RunRecord:
    """Returns the record in a file.

    Raises:
        OptionError: There is no such file, or it has no record of this version.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise KeyError("format")
        found["models"] = [
            PlannedModel(
                **{
                    **one,
                    "chosen": PlanFigures(**one["chosen"]),
                    "others": [PlanFigures(**other) for other in one["others"]],
                }
            )
            for one in found["models"]
        ]
        found["steps"] = [Step(**one) for one in found["steps"]]
        return RunRecord(**found)
    except OSError as error:
        raise OptionError(
            f"{file}: {error.strerror}", "a report.json of a run", "MOREH_REPORT=folder python train.py", LINK
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"{file} is no record of a run of this version",
            f"a report.json with format {FORMAT}",
            "MOREH_REPORT=folder python train.py",
            LINK,
        ) from error


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a report may show: ours, and others by name; of secrets only that they are set."""
    names = sorted(name for name in environment if name.startswith(_OURS) or name in SHOWN_VARIABLES)
    return {name: MASK if any(part in name for part in _MASKED) else environment[name] for name in names}


def shown_command(arguments: list[str]) -> str:
    """Returns a command line without the values that may be secrets: of ``--hub-token x`` and ``--token=x``."""
    shown, hides_next = [], False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        is_secret = name.startswith("-") and any(part in name.upper() for part in _MASKED)
        if hides_next and not argument.startswith("-"):
            shown.append(MASK)
        elif is_secret and has_value:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(argument)
        hides_next = is_secret and not has_value
    return " ".join(shown)
