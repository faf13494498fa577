"""Training of a tiny random Whisper with Seq2SeqTrainer on made-up spectrograms, evaluated by generation.

With --ap it has the one line; prints losses and metrics.
"""

import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

VOCABULARY, FRAMES = 50, 40


def recordings(count):
    return [
        {"input_features": torch.randn(16, FRAMES), "labels": torch.randint(5, VOCABULARY, (6 + number % 2,))}
        for number in range(count)
    ]


def collate(rows):
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": labels}


def main():
    torch.manual_seed(1)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=5e-3,
            warmup_steps=1,
            logging_steps=1,
            predict_with_generate=True,
            generation_max_length=8,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Seq2SeqTrainer(
            model=model,
            args=arguments,
            train_dataset=recordings(40),
            eval_dataset=recordings(8),
            data_collator=collate,
            compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
        )
        trainer.train()
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"loss {row['loss']:.6f} norm {row['grad_norm']:.4f}")
        found = trainer.evaluate()
        print(f"held out: loss {found['eval_loss']:.6f} tokens {found['eval_sum']:.1f}")


if __name__ == "__main__":
    main()
