"""PyTorch-Ignite: a supervised trainer and evaluators with metrics, handlers on events, a checkpoint.

With --ap it has the one line; prints losses and metrics.
"""

import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    classes = torch.randint(0, 4, (96,))
    pictures = torch.randn(96, 1, 10, 10) + classes.view(-1, 1, 1, 1) / 2
    train_loader = DataLoader(TensorDataset(pictures[:64], classes[:64]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(pictures[64:], classes[64:]), batch_size=16)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),  # RMSprop would make large steps of rounding in front of the normalisation
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    criterion = nn.CrossEntropyLoss()

    trainer = create_supervised_trainer(model, optimizer, criterion, device)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")
    metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics=metrics, device=device)

    @trainer.on(Events.ITERATION_COMPLETED)
    def print_loss(engine):
        print(f"loss {engine.state.output:.6f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(val_loader)
        found = evaluator.state.metrics
        print(f"held out: loss {found['loss']:.6f} accuracy {found['accuracy']:.6f}")
        print(f"average {engine.state.metrics['average']:.6f}")

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(
            folder,
            n_saved=1,
            filename_prefix="best",
            score_function=lambda engine: engine.state.metrics["accuracy"],
            score_name="accuracy",
        )
        evaluator.add_event_handler(Events.COMPLETED, checkpoint, {"model": model})
        trainer.run(train_loader, max_epochs=3)
        print(f"saved {checkpoint.last_checkpoint is not None}")


if __name__ == "__main__":
    main()
