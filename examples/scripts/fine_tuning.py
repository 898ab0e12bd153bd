"""A trained network learns another task: its head first, then all of it at a lower rate.

SGD with momentum and a group for head and body each, as in PyTorch's tutorial on transfer learning.
Layers are frozen after the optimizer has been made: a job has the parameters that require a
gradient at that time.

python fine_tuning.py --plain                            # torch alone
gadei-ps run tuned --learners 2 -- python fine_tuning.py # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=3200)
parser.add_argument("--pretraining", type=int, default=1280, help="samples")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


def images(count, seed, kinds):
    """Return blobs of `kinds` sorts, each at a place of its own, on 3 x 16 x 16."""
    draw = torch.Generator().manual_seed(kinds)
    patterns = torch.rand(kinds, 3, 4, 4, generator=draw)
    patterns = nn.functional.interpolate(patterns, 16, mode="bilinear")
    draw.manual_seed(seed)
    labels = torch.randint(0, kinds, (count,), generator=draw)
    return TensorDataset(
        patterns[labels] + 0.5 * torch.randn(count, 3, 16, 16, generator=draw), labels
    )


def pretrained():
    """A network that distinguishes ten sorts; in the place of one that is downloaded."""
    torch.manual_seed(1)
    features = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )  # fmt: skip
    model = nn.Sequential()
    model.add_module("features", features)
    model.add_module("fc", nn.Linear(128, 10))
    made = optim.Adam(model.parameters(), lr=1e-3)
    for inputs, labels in DataLoader(images(args.pretraining, 1, 10), batch_size=64):
        made.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        made.step()
    return model


model = pretrained()
# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
model.fc = nn.Linear(128, 5)
groups = [
    {"params": model.features.parameters(), "lr": 1e-3},
    {"params": model.fc.parameters(), "lr": 1e-2},
]
if args.plain:
    optimizer = optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=1e-4)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        model, kind="sgd", groups=groups, lr=1e-2, momentum=0.9, weight_decay=1e-4
    )
exp_lr_scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
criterion = nn.CrossEntropyLoss()
dataloaders = {
    "train": DataLoader(images(args.samples, 2, 5), batch_size=32, shuffle=True),
    "val": DataLoader(images(1000, 3, 5), batch_size=250),
}

start = time.perf_counter()
for epoch in range(args.epochs):
    for param in model.features.parameters():
        param.requires_grad = epoch >= args.epochs // 2
    for phase in ("train", "val"):
        model.train(phase == "train")
        running_loss = 0.0
        for inputs, labels in dataloaders[phase]:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = criterion(model(inputs), labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.item() * len(inputs)
    exp_lr_scheduler.step()
    val_loss = running_loss / len(dataloaders["val"].dataset)
    print(f"epoch {epoch + 1}: val loss {val_loss:.4f}", flush=True)
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"val loss {val_loss:.6f}", flush=True)
