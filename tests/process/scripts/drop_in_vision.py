"""Image classification in the way of PyTorch's own examples: meters, best checkpoints, resume, then transfer learning.

With --ap it has the one line; prints losses and accuracies.
"""

import copy
import os
import sys
import tempfile

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Subset, TensorDataset

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
gpu = 0 if device.type == "cuda" else None


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, 8, 3, 1, 1), nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layer(self.stem(x))), 1))


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.4f}"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def run(loader, model, criterion, optimizer=None):
    losses, top1, top5 = AverageMeter("loss"), AverageMeter("Acc@1"), AverageMeter("Acc@5")
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for images, target in loader:
            if gpu is not None:
                images = images.cuda(gpu, non_blocking=True)
                target = target.cuda(gpu, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    print(f"{losses} {top1.name} {float(top1.sum / top1.count):.4f} {top5.name} {float(top5.sum / top5.count):.4f}")
    return top1.sum / top1.count


data = TensorDataset(torch.randn(28, 3, 12, 12), torch.randint(0, 10, (28,)))
train_loader = DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
val_loader = DataLoader(Subset(data, range(20)), batch_size=8)
criterion = nn.CrossEntropyLoss().to(device)


def main_worker(epochs, file):
    model = ResNet()
    if gpu is not None:
        torch.accelerator.set_device_index(gpu)
        model = model.cuda(gpu)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start, best_acc1 = 0, 0
    if os.path.isfile(file):
        checkpoint = torch.load(file, map_location=f"cuda:{gpu}" if gpu is not None else None)
        start, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"].to(device)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    for epoch in range(start, epochs):
        run(train_loader, model, criterion, optimizer)
        best_acc1 = max(run(val_loader, model, criterion), torch.as_tensor(best_acc1, device=device))
        scheduler.step()
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}
        torch.save({**state, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    return model


with tempfile.TemporaryDirectory() as folder:
    main_worker(2, f"{folder}/checkpoint")
    model = main_worker(3, f"{folder}/checkpoint")

# -- transfer learning: a head of its own, phases, the best weights ----------------------------------------------------


def train_model(model, optimizer, scheduler, num_epochs=2):
    best_acc, best_weights = 0.0, copy.deepcopy(model.state_dict())
    for _ in range(num_epochs):
        for phase, loader in (("train", train_loader), ("val", val_loader)):
            model.train(phase == "train")
            running_loss, running_corrects = 0.0, 0
            for inputs, labels in loader:
                inputs, labels = inputs.to(device), labels.to(device) % 2
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == "train":
                scheduler.step()
            acc = running_corrects.double() / len(loader.dataset)
            print(f"{phase} loss {running_loss / len(loader.dataset):.4f} Acc: {acc:.4f}")
            if phase == "val" and acc > best_acc:
                best_acc, best_weights = acc, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


for parameter in model.parameters():
    parameter.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, 2)
model = model.to(device)
optimizer = optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
train_model(model, optimizer, lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1))
for parameter in model.layer[1].parameters():
    parameter.requires_grad = True
optimizer.add_param_group({"params": model.layer[1].parameters(), "lr": 0.01})
train_model(model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=4), num_epochs=1)
