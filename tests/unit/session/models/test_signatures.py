"""What is known of a call before its answer: its number on the workers, and the structure of its result."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.hook_records import Report
from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.protocol.pytree import pickle_treespec
from moreh_ap.session.models.signatures import Signatures, Structure
from moreh_ap.session.outbox import Outbox
from unit.session.samples import Workers


def rows(*shape, kind="rows", differentiable=True):
    return LeafReply(kind, shape, torch.float32, differentiable, None)


def constant(value):
    return LeafReply("const", (), None, False, pickle.dumps(value))


def reply(tree, leaves, own_rows=None, note=""):
    nesting = pickle_treespec(pytree.tree_flatten(tree)[1])
    return ForwardReply(nesting, tuple(leaves), "split", note, own_rows)


def structure(*leaves, tree=None, note=""):
    return Structure.of([reply(list(range(len(leaves))) if tree is None else tree, leaves, note=note)])


@pytest.fixture
def signatures():
    workers = Workers()
    made = Signatures(Outbox(workers), "model0")
    made.workers, made.outbox = workers, made._outbox
    return made


def test_rows_of_all_workers_make_the_whole_and_other_leaves_are_the_same_everywhere():
    first = reply(["a", "b", "c"], [rows(3, 5), rows(4, kind="same"), constant("x")], own_rows=3)
    second = reply(["a", "b", "c"], [rows(2, 5), rows(4, kind="same"), constant("x")], own_rows=2)
    found = Structure.of([first, None, second])
    assert [leaf.shape for leaf in found.leaves] == [(5, 5), (4,), ()]
    assert found.leaves[2].constant == "x" and found.leaves[0].num_bytes() == 100
    assert found.batch.rows == (3, None, 2) and not found.draws
    assert found.leaves[0].meta.is_meta and found.leaves[0].meta.shape == (5, 5)


def test_a_script_can_tell_shapes_nesting_and_constants_apart_but_not_where_parts_are():
    one = structure(rows(2, 3))
    assert one.promises_the_same(structure(rows(2, 3)))
    assert not one.promises_the_same(structure(rows(2, 4)))
    assert not one.promises_the_same(structure(rows(2, 3, differentiable=False)))
    assert not one.promises_the_same(structure(rows(2, 3), tree={"loss": 0}))
    assert one.promises_the_same(structure(rows(2, 3, kind="share")))


def test_attributes_that_a_forward_sets_do_not_count_as_its_result_and_make_it_unpredictable():
    plain = structure(rows(2), tree=[0])
    report = Report([0], [], None, {"cache": 0})
    setting = structure(rows(2), constant(None), rows(9), tree=report)
    assert setting.is_report and setting.attributes == ("cache",)
    assert setting.promises_the_same(plain)
    assert plain.predictable() and not setting.predictable()


def test_a_computed_number_is_not_predicted():
    assert structure(rows(2), constant(None)).predictable()
    assert not structure(rows(2), constant(7)).predictable()


def test_workers_learn_a_signature_once(signatures):
    x, y = torch.ones(2), torch.zeros(3)
    first, tensors = signatures.define("", (x,), {"scale": 2.0, "mask": y})
    assert [id(tensor) for tensor in tensors] == [id(x), id(y)]
    again, _ = signatures.define("", (torch.ones(7),), {"scale": 2.0, "mask": x})
    others = [signatures.define("", (x,), {"scale": 3.0, "mask": y})[0]]
    others.append(signatures.define("head", (x,), {"scale": 2.0, "mask": y})[0])
    others.append(signatures.define("", (x, y), {"scale": 2.0})[0])
    assert first == again and len({first.number, *(one.number for one in others)}) == 4
    signatures.outbox.flush()
    assert [len(message) for message in signatures.workers.told] == [4]


def test_a_generator_is_refused(signatures):
    with pytest.raises(UnsupportedError, match=r"torch\.Generator was passed"):
        signatures.define("", (torch.Generator(),), {})


def test_only_what_must_come_again_is_remembered(signatures):
    one = structure(rows(2))
    signatures.learn("a", one, grad=True)
    signatures.learn("b", structure(constant(3)), grad=True)
    assert signatures.structures == {"a": one}
    signatures.never_predict("a")
    signatures.learn("a", one, grad=True)
    assert signatures.structures == {}


def test_a_new_attribute_makes_earlier_structures_unknown(signatures):
    signatures.learn("a", structure(rows(2)), grad=True)
    setting = structure(rows(2), constant(None), rows(9), tree=Report([0], [], None, {"cache": 0}))
    signatures.learn("b", setting, grad=True)
    assert signatures.structures == {} and signatures.passes_more
    signatures.learn("a", structure(rows(2)), grad=True)
    signatures.learn("b", setting, grad=True)
    assert list(signatures.structures) == ["a"]


def test_the_log_says_once_why_a_training_batch_is_not_shared(signatures, capsys):
    noted = structure(rows(2), note="the batch is not shared")
    signatures.learn("a", noted, grad=False)
    assert capsys.readouterr().out == ""
    signatures.learn("a", noted, grad=True)
    signatures.learn("b", noted, grad=True)
    assert capsys.readouterr().out.count("the batch is not shared") == 1
