"""A multi-layer perceptron for small images, after PyTorch's quickstart tutorial: SGD.

python quickstart_mlp.py --plain                                     # torch alone
gadei-ps run quickstart --learners 2 -- python quickstart_mlp.py     # two learners
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=6400)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


def make_data(count, seed):
    """Ten kinds of garments: a pattern each, in noise."""
    patterns = torch.rand(10, 28, 28, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (count,), generator=draw)
    brightness = 0.5 + torch.rand(count, 1, 1, generator=draw)
    x = patterns[y] * brightness + 1.5 * torch.randn(count, 28, 28, generator=draw)
    return TensorDataset(x, y)


train_dataloader = DataLoader(make_data(args.samples, 1), batch_size=args.batch_size, shuffle=True)
test_dataloader = DataLoader(make_data(2000, 2), batch_size=args.batch_size)


class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(
            nn.Linear(28 * 28, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def forward(self, x):
        return self.linear_relu_stack(self.flatten(x))


model = NeuralNetwork()
loss_fn = nn.CrossEntropyLoss()
if args.plain:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="sgd", lr=1e-2)


def train(dataloader):
    model.train()
    for X, y in dataloader:
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test(dataloader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for X, y in dataloader:
            pred = model(X)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    return test_loss / len(dataloader), correct / len(dataloader.dataset)


start = time.perf_counter()
for t in range(args.epochs):
    train(train_dataloader)
    test_loss, accuracy = test(test_dataloader)
    print(f"Epoch {t + 1}: accuracy {100 * accuracy:.1f}%, avg loss {test_loss:.4f}", flush=True)
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"test loss {test_loss:.6f}", flush=True)
