"""The verdict that follows from the comparisons of one probe: which kind each leaf of the result has, or why none fits.

Decides in which order a probe compares, and which errors mean that the forward cannot be split. Must not know which
other probes are tried; `split_check.py` does.
"""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.trial.agreement import everywhere
from moreh_ap.parallelizer.trial.fault_finding import Outcome, try_out
from moreh_ap.parallelizer.trial.joined_probe import JoinedProbe
from moreh_ap.parallelizer.trial.probe import Probe
from moreh_ap.parallelizer.trial.row_comparison import without_attributes
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict


def verdict_of(probe: Probe) -> SplitVerdict:
    """Runs a probe's comparisons, and returns the verdict that follows from them. A collective.

    Raises:
        UnsupportedError: A result of a training call is on an earlier stage of a pipeline.
    """
    call = probe.call
    for step in (probe.compare_draws, probe.compare_outputs, *([probe.compare_gradients] if call.grad else [])):
        tried = try_out(step, probe.run_again, call)
        if tried.outcome > Outcome.REFUSED and step == probe.compare_draws and call.grad:  # it may need gradients
            probe.has_graph = True
            tried = try_out(step, probe.run_again, call)
        if tried.outcome is not Outcome.DONE:
            could_run, faults = tried.outcome is not Outcome.CANNOT_RUN, (tried.fault,) if tried.fault else ()
            found = SplitVerdict.unsplit(tried.reason, could_run=could_run, faults=faults)
            return replace(found, written=probe.written, added=probe.added)
    if not everywhere(not probe.has_unknown, call):
        raise UnsupportedError(
            "a result of a training call is on an earlier stage of the pipeline (hidden states of every layer?)",
            "results that the last stage computes, calls under torch.no_grad(), or plans with pipeline=1",
            'plan="shard=2"',
        )
    kinds, attributes = without_attributes(probe.kinds, probe.attributes)
    stages = stages_of(call.module) if call.grad else None  # those of the last one have the result
    kinds = kinds if stages is None else stages.of_last_stage(kinds)
    found = SplitVerdict(True, kinds, "", probe.takes_means, call.rules, probe.is_joined, probe.draws, attributes)
    if probe.places or probe.turned:
        each_leaf = tuple(map(probe.places.get, range(len(probe.kinds))))
        places, of_attributes = without_attributes(each_leaf, probe.attributes)
        found = replace(found, means=True, places=places, attribute_places=of_attributes)
    parts = probe.parts if isinstance(probe, JoinedProbe) else ()
    return replace(found, written=probe.written, steps=probe.steps, in_order=probe.in_order, parts=parts)
