"""Digits by several processes, after mnist_hogwild of pytorch/examples: SGD with momentum.

With --plain the script starts its processes itself, and they share the model's memory (Hogwild).
In a job `gadei-ps run` starts them, and each of them is a learner.

python mnist_hogwild.py --plain --num-processes 2                  # torch alone
gadei-ps run hogwild --learners 2 -- python mnist_hogwild.py       # two learners
"""

import argparse
import os
import time

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=3200)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--num-processes", type=int, default=1, help="with --plain")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Ten blurred shapes of 28 x 28 in noise."""
    draw = torch.Generator().manual_seed(0)
    shapes = F.interpolate(torch.rand(10, 1, 7, 7, generator=draw), 28, mode="bilinear")
    draw.manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    return TensorDataset(
        2 * shapes[labels] + 1.0 * torch.randn(count, 1, 28, 28, generator=draw), labels
    )


def train(rank, args, model, dataset):
    torch.manual_seed(args.seed + rank)
    train_loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    if args.plain:
        optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(
            model, kind="sgd", lr=args.lr, momentum=args.momentum
        )
    model.train()
    for _ in range(args.epochs):
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()


def test(model, dataset):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, target in DataLoader(dataset, batch_size=1000):
            test_loss += F.nll_loss(model(data), target, reduction="sum").item()
    return test_loss / len(dataset)


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dataset = digits(args.samples, 1)
    model = Net()
    start = time.perf_counter()
    if args.plain and args.num_processes > 1:
        mp.set_start_method("spawn", force=True)
        model.share_memory()
        processes = [
            mp.Process(target=train, args=(rank, args, model, dataset))
            for rank in range(args.num_processes)
        ]
        for p in processes:
            p.start()
        for p in processes:
            p.join()
    else:
        train(int(os.environ.get("GADEI_PS_LEARNER", "0")), args, model, dataset)
    samples = args.epochs * args.samples * args.num_processes
    print(f"{samples} samples in {time.perf_counter() - start:.3f} s")
    print(f"test loss {test(model, digits(2000, 2)):.6f}", flush=True)
