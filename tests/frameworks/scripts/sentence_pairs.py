"""Trains a tiny random BERT on sentence pairs with SentenceTransformerTrainer and MultipleNegativesRankingLoss.

With --ap it has the one line; prints losses and similarities.
"""

import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = ["a", "the", "red", "blue", "cat", "dog", "bird", "sings"]
WORDS += ["runs", "sleeps", "quickly", "slowly", "today", "here", "there"]


def tiny_bert(folder):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return SentenceTransformer(modules=[layer := Transformer(folder), Pooling(layer.get_embedding_dimension())])


def sentences(count):
    draws = torch.randint(0, len(WORDS), (count, 6)).tolist()
    return [" ".join(WORDS[word] for word in draw[: 3 + number % 4]) for number, draw in enumerate(draws)]


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_bert(folder)
        anchors = sentences(48)
        pairs = Dataset.from_dict({"anchor": anchors, "positive": [f"{text} here" for text in anchors]})
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        loss = MultipleNegativesRankingLoss(model)
        trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
        trainer.train()
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"loss {row['loss']:.6f} norm {row['grad_norm']:.4f}")
        embeddings = model.encode(["the red cat sleeps", "the blue bird sings", "a dog runs"])
        print(f"similarity {float(model.similarity(embeddings, embeddings)[0, 1]):.6f}")


if __name__ == "__main__":
    main()
