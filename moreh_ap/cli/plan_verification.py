"""Trains a model's small copy under each plan and in one process, and compares.

Decides which model is trained and what becomes of a plan whose training fails. Must not know how the outcome is shown.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moreh_ap import device
from moreh_ap.accelerator.enabling import enable
from moreh_ap.cli.script_run import run_until_first_call
from moreh_ap.errors import OptionError, PlanError
from moreh_ap.integrations import transformers_families
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.calls import UNSPLIT
from moreh_ap.session.verification import equivalence, reduced_model
from moreh_ap.session.verification.equivalence import Equivalence, Subject, Training
from moreh_ap.settings import Options

Prepared = tuple[Subject, Training]
"""A small model with its calls, and what one process makes of them."""


def num_rows_for(plans: list[Plan], rows: int | None) -> int:
    """Returns the rows of a batch: `rows`, or as many as the plans need."""
    return rows or max(reduced_model.rows_for(plan) for plan in plans)


def verify_plans(plans: list[Plan], prepare: Callable[[int], Prepared]) -> list[Equivalence]:
    """Returns what was found for each plan, in the order given; workers start once for each number of devices.

    Args:
        prepare: Gives, for a number of blocks, the small model and what one process makes of it.
    """
    found: dict[Plan, Equivalence] = {}
    try:
        for plan in sorted(set(plans), key=lambda plan: plan.num_devices):
            print(f"{plan} ...", flush=True)
            found[plan] = _verify_plan(plan, prepare)
    finally:
        device.disable()
    return [found[plan] for plan in plans]


def _verify_plan(plan: Plan, prepare: Callable[[int], Prepared]) -> Equivalence:
    subject, expected = prepare(reduced_model.depth_for(plan))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # the start of the workers, once for every plan, is not what was asked for
        accelerator = device.current()
        if accelerator is None or accelerator.session.num_devices != plan.num_devices:
            device.disable()
            enable(Options(devices=plan.num_devices, plan=plan, mixed_precision=False))
            accelerator = device.current()
        try:
            with accelerator.session.trying(plan):
                found = equivalence.measure(subject, expected, plan)
        except PlanError as error:
            return Equivalence(str(plan), "refused", error.fact)
        except Exception as error:  # of any kind: whatever the model or a worker raised is this plan's outcome
            device.disable()  # its workers may be lost; the next plan starts its own
            first_line = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return Equivalence(str(plan), "failed", first_line)
        finally:
            current = device.current()
            if current is not None:
                current.session.synchronize()
    if UNSPLIT in said.getvalue() and found.is_verified and plan.data_parallel * plan.micro_batches > 1:
        return replace(found, reason="every device computes the whole batch")
    return found


# -- the models --------------------------------------------------------------------------------------------------------


def from_model(model: str, rows: int, sequence_length: int) -> Callable[[int], Prepared]:
    """Returns what prepares a small model with a given number of blocks, of a family or a configuration.

    Args:
        model: Name of a family, a folder with a `config.json`, or that file.
        rows: Rows of a batch.
        sequence_length: Positions of a row.

    Raises:
        OptionError: There is no such family, folder or configuration.
    """
    prepared: dict[int, Prepared] = {}

    def prepare(depth: int) -> Prepared:
        if depth not in prepared:
            try:
                module, calls = transformers_families.model_and_calls(
                    model, rows, sequence_length, depth, equivalence.STEPS
                )
                subject = reduced_model.subject_of(module, calls)
                prepared[depth] = (subject, equivalence.reference(subject))
            except Exception as error:  # of any kind: transformers' own model did not take what it was given
                raise OptionError(
                    f"a small {model} does not train in one process: {type(error).__name__}: {error}",
                    "a model whose forward takes input_ids, attention_mask and labels; for others, a script",
                    "moreh-ap verify train.py",
                ) from error
        return prepared[depth]

    try:
        transformers_families.configuration_of(model)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(
            f"{model} is no model that can be verified: {type(error).__name__}: {error}",
            f"a script, a folder with a config.json, or one of {', '.join(transformers_families.FAMILIES)}",
            "moreh-ap verify llama",
        ) from error
    return prepare


def from_script(path: Path, arguments: list[str], plans: list[Plan], rows: int) -> Callable[[int], Prepared]:
    """Returns what gives the small copy of a script's model with a given number of blocks.

    Every copy that the plans need is made before the script is left.

    Raises:
        OptionError: The script ends without calling a model on the accelerator.
    """
    depths = {reduced_model.depth_for(plan) for plan in plans}

    def copy_call(root: Any, call: Any) -> dict[int, Prepared]:
        return {depth: reduced_model.reduce_call(root, call, rows, depth) for depth in depths}

    return run_until_first_call(path, arguments, copy_call).__getitem__
