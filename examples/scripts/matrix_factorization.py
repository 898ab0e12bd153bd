"""Recommendations by matrix factorization with sparse embeddings: Adagrad.

python matrix_factorization.py --plain                              # torch alone
gadei-ps run films --learners 2 -- python matrix_factorization.py   # two learners
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, n_factors=32):
        super().__init__()
        self.user_factors = nn.Embedding(n_users, n_factors, sparse=True)
        self.item_factors = nn.Embedding(n_items, n_factors, sparse=True)
        self.user_biases = nn.Embedding(n_users, 1, sparse=True)
        self.item_biases = nn.Embedding(n_items, 1, sparse=True)
        nn.init.normal_(self.user_factors.weight, std=0.1)
        nn.init.normal_(self.item_factors.weight, std=0.1)
        nn.init.zeros_(self.user_biases.weight)
        nn.init.zeros_(self.item_biases.weight)

    def forward(self, user, item):
        pred = (self.user_factors(user) * self.item_factors(item)).sum(1)
        return pred + self.user_biases(user).squeeze(1) + self.item_biases(item).squeeze(1)


def ratings(count, users, items, seed):
    """Return ratings of items by users: products of hidden factors, with noise."""
    draw = torch.Generator().manual_seed(0)
    tastes = torch.randn(users, 4, generator=draw)
    kinds = torch.randn(items, 4, generator=draw)
    draw.manual_seed(seed)
    user = torch.randint(0, users, (count,), generator=draw)
    item = torch.randint(0, items, (count,), generator=draw)
    noise = 0.2 * torch.randn(count, generator=draw)
    return user, item, (tastes[user] * kinds[item]).sum(1) / 2 + noise


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--ratings", type=int, default=64000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # Each learner of a job draws batches of its own.
    torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
    rated = TensorDataset(*ratings(args.ratings, args.users, args.items, 1))
    loader = DataLoader(rated, batch_size=args.batch_size, shuffle=True)
    model = MatrixFactorization(args.users, args.items)
    loss_func = nn.MSELoss()
    if args.plain:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adagrad", lr=args.lr)

    start = time.perf_counter()
    for epoch in range(args.epochs):
        total = 0.0
        for user, item, rating in loader:
            optimizer.zero_grad()
            loss = loss_func(model(user, item), rating)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}", flush=True)
    print(f"{args.epochs * args.ratings} samples in {time.perf_counter() - start:.3f} s")
    user, item, rating = ratings(5000, args.users, args.items, 2)
    with torch.no_grad():
        print(f"test loss {loss_func(model(user, item), rating).item():.6f}", flush=True)


if __name__ == "__main__":
    main()
