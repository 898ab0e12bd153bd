"""Regression on a table of numbers and categories: AdamW and OneCycleLR with its defaults.

OneCycleLR moves the rate and, by its defaults, the momentum (AdamW's first beta) of each step.

python tabular.py --plain                             # torch alone
gadei-ps run table --learners 2 -- python tabular.py  # two learners
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

CATEGORIES = (12, 30, 7)


class TabularModel(nn.Module):
    """Embeddings of the categories beside the numbers, then layers with batch norm and dropout."""

    def __init__(self, numbers):
        super().__init__()
        sizes = [min(50, (count + 1) // 2) for count in CATEGORIES]
        self.embeds = nn.ModuleList(
            nn.Embedding(count, size) for count, size in zip(CATEGORIES, sizes, strict=True)
        )
        self.bn_cont = nn.BatchNorm1d(numbers)
        layers = []
        width = sum(sizes) + numbers
        for out in (128, 64):
            layers += [nn.Linear(width, out), nn.ReLU(), nn.BatchNorm1d(out), nn.Dropout(0.05)]
            width = out
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, categories, numbers):
        embedded = [embed(categories[:, i]) for i, embed in enumerate(self.embeds)]
        return self.layers(torch.cat([*embedded, self.bn_cont(numbers)], dim=1)).squeeze(1)


def table(rows, seed):
    draw = torch.Generator().manual_seed(0)
    effects = [torch.randn(count, generator=draw) for count in CATEGORIES]
    draw.manual_seed(seed)
    categories = torch.stack(
        [torch.randint(0, count, (rows,), generator=draw) for count in CATEGORIES], dim=1
    )
    numbers = torch.randn(rows, 10, generator=draw)
    target = sum(effect[categories[:, i]] for i, effect in enumerate(effects))
    target = target + numbers[:, 0] * numbers[:, 1] + torch.sin(2 * numbers[:, 2])
    return TensorDataset(categories, numbers, target + 0.1 * torch.randn(rows, generator=draw))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=12800)
    parser.add_argument("--max-lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # Each learner of a job draws batches of its own.
    torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
    train_dl = DataLoader(table(args.rows, 1), batch_size=64, shuffle=True)
    valid_dl = DataLoader(table(2000, 2), batch_size=500)
    model = TabularModel(10)
    if args.plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adamw", lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, steps_per_epoch=len(train_dl), epochs=args.epochs
    )
    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for categories, numbers, target in train_dl:
            loss = nn.functional.mse_loss(model(categories, numbers), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    print(f"{args.epochs * args.rows} samples in {time.perf_counter() - start:.3f} s")
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(c, n), t).item() for c, n, t in valid_dl]
    print(f"valid loss {sum(losses) / len(losses):.6f}", flush=True)


if __name__ == "__main__":
    main()
