"""The kinds of plans that have to be verified, and the families for which they were."""

from __future__ import annotations

from moreh_ap.plan import Plan
from moreh_ap.planner.search import verified_kinds


def test_which_kinds_have_to_be_verified():
    llama = "transformers.models.llama.modeling_llama.LlamaForCausalLM llama"
    assert not verified_kinds.kinds_to_verify(Plan(replicate=2, shard=2, micro_batches=4))
    assert verified_kinds.is_verified(llama, Plan(tensor=2, pipeline=2))
    assert not verified_kinds.is_verified("somebody.Else llama", Plan(tensor=2))
    for family, kinds in verified_kinds.verified_kinds().items():
        assert len(family.split()) == 2
        assert kinds <= {"tensor", "sequence_parallel", "pipeline"}
