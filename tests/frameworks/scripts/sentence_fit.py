"""Trains sentence embeddings with `SentenceTransformer.fit`: InputExample pairs with scores, cosine similarity loss.

With --ap it has the one line; prints losses and an evaluator's score.
"""

import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from sentence_pairs import sentences, tiny_bert
from sentence_transformers import InputExample, losses
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_bert(folder)
        first, second = sentences(32), sentences(32)
        scores = torch.rand(32).tolist()
        examples = [InputExample(texts=[a, b], label=score) for a, b, score in zip(first, second, scores)]
        loader = DataLoader(examples, shuffle=True, batch_size=8)
        evaluator = EmbeddingSimilarityEvaluator(first, second, scores)
        loss = losses.CosineSimilarityLoss(model)
        model.old_fit(
            train_objectives=[(loader, loss)],
            epochs=2,
            warmup_steps=2,
            optimizer_params={"lr": 1e-3},
            show_progress_bar=False,
        )
        found = evaluator(model)
        print("\n".join(f"{name.split('_')[0]} {value:.4f}" for name, value in found.items()))
        for text in ("the red cat sleeps", "a dog runs here"):
            print(f"embedding {float(model.encode(text).sum()):.5f}")


if __name__ == "__main__":
    main()
