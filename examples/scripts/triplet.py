"""Faces identified by distances: a siamese network with a triplet loss, SGD with Nesterov momentum.

python triplet.py --plain                             # torch alone
gadei-ps run faces --learners 2 -- python triplet.py  # two learners
"""

import argparse
import os
import random
import time

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=1600)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws triplets of its own.
seed = args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0"))
torch.manual_seed(seed)
random.seed(seed)


class Faces(Dataset):
    """An anchor, another picture of the same one of 40 people, and one of another person."""

    people = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 40, (count,), generator=draw)
        noise = 0.3 * torch.randn(count, 1, 16, 16, generator=draw)
        self.data = self.people[self.labels] + noise
        self.grouped = [torch.where(self.labels == label)[0].tolist() for label in range(40)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        label = int(self.labels[index])
        positive = random.choice(self.grouped[label])
        other = random.choice([one for one in range(40) if one != label])
        negative = random.choice(self.grouped[other])
        return self.data[index], self.data[positive], self.data[negative]


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.PReLU(), nn.MaxPool2d(2, stride=2),
            nn.Conv2d(16, 32, 3), nn.PReLU(), nn.MaxPool2d(2, stride=2),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(128, 64), nn.PReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.fc(self.convnet(x).flatten(1))


class TripletNet(nn.Module):
    def __init__(self, embedding_net):
        super().__init__()
        self.embedding_net = embedding_net

    def forward(self, *images):
        return [self.embedding_net(one) for one in images]


train_loader = DataLoader(Faces(args.samples, 1), args.batch_size, shuffle=True, drop_last=True)
model = TripletNet(EmbeddingNet())
criterion = nn.TripletMarginLoss(margin=1.0)
if args.plain:
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        model, kind="sgd", lr=args.lr, momentum=0.9, nesterov=True
    )
scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[args.epochs // 2], gamma=0.1)

start = time.perf_counter()
for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for images in train_loader:
        optimizer.zero_grad()
        loss = criterion(*model(*images))
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}", flush=True)
samples = args.epochs * len(train_loader) * args.batch_size
print(f"{samples} samples in {time.perf_counter() - start:.3f} s")
model.eval()
random.seed(0)
with torch.no_grad():
    losses = [criterion(*model(*images)).item() for images in DataLoader(Faces(800, 2), 200)]
print(f"test loss {sum(losses) / len(losses):.6f}", flush=True)
