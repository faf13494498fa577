"""Whether a script computes its loss itself, told by the first call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.session.planning.loss_place import LEAST_CLASSES
from moreh_ap.session.planning.model_profiling import profile_model, shape_of

IDS = torch.zeros(2, 5, dtype=torch.long)


class Speaker(nn.Module):
    """Returns what its script asks for."""

    def __init__(self, classes: int = LEAST_CLASSES) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(classes, 4), nn.Linear(4, classes)

    def forward(self, ids, labels=None, only_loss=False, asks_values=False):
        hidden = self.words(ids)
        if asks_values and float(hidden.sum()) > 0:
            hidden = hidden + 1
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if only_loss else (logits, loss)


def place(root, *args, **kwargs):
    profile = profile_model(root, None, (root, args, kwargs), 2)
    return profile.loss_outside, profile.logits_returned


def test_a_result_tells_who_computes_the_loss():
    speaker = Speaker()
    assert place(speaker, IDS) == (True, True)
    assert place(speaker, IDS, IDS) == (False, True)
    assert place(speaker, IDS, IDS, only_loss=True) == (False, False)


def test_where_nothing_tells_the_forward_computes_it():
    assert place(Speaker(LEAST_CLASSES - 1), IDS) == (False, True)
    assert place(Speaker(), IDS, asks_values=True) == (False, True)
    assert place(Speaker().eval(), IDS) == (False, True)
    with torch.no_grad():
        assert place(Speaker(), IDS) == (False, True)


@pytest.mark.parametrize("labels", [None, IDS])
def test_models_of_transformers_compute_the_loss_of_labels(labels):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=LEAST_CLASSES, **sizes)
    with torch.device("meta"):
        root = transformers.LlamaForCausalLM(config).train()
    from_configuration = profile_model(root, _shape(root), (root, (IDS,), {"labels": labels}), 2)
    assert (from_configuration.loss_outside, from_configuration.logits_returned) == (labels is None, True)


def _shape(root):
    found = shape_of(root)
    assert found is not None
    return found
