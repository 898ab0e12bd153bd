"""A convolutional network for digits, after mnist/main.py of pytorch/examples: Adadelta and StepLR.

python mnist_cnn.py --plain                                # torch alone
gadei-ps run mnist --learners 2 -- python mnist_cnn.py     # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count):
    """Ten blurred shapes of 28 x 28, moved about, in noise."""
    draw = torch.Generator().manual_seed(0)
    shapes = F.interpolate(torch.rand(10, 1, 7, 7, generator=draw), 28, mode="bilinear")
    labels = torch.randint(0, 10, (count,), generator=draw)
    moves = torch.randint(-3, 4, (count, 2), generator=draw).tolist()
    images = [
        torch.roll(shapes[label], move, (1, 2)) for label, move in zip(labels, moves, strict=True)
    ]
    noise = 0.7 * torch.randn(count, 1, 28, 28, generator=draw)
    return TensorDataset(torch.stack(images) + noise, labels)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    # Each learner of a job draws batches of its own.
    torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
    images = digits(args.samples + 1024)
    held_out, rest = torch.utils.data.random_split(
        images, [1024, args.samples], torch.Generator().manual_seed(0)
    )
    train_loader = DataLoader(rest, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=256)

    model = Net()
    if args.plain:
        optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    else:
        optimizer = gadei_ps.learners.torch.LocalOptimizer(
            model, lambda parameters: optim.Adadelta(parameters, lr=args.lr)
        )
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer)
        loss, accuracy = test(model, test_loader)
        print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
        scheduler.step()
    print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
    print(f"test loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
