"""A mixture of experts: a router sends each sample to two of eight experts. Adam.

An expert that no sample of a batch is sent to has no gradient, and stays as it is.

python mixture_of_experts.py --plain                               # torch alone
gadei-ps run experts --learners 2 -- python mixture_of_experts.py  # two learners
"""

import argparse
import os
import time

import torch
from torch import nn

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class MoE(nn.Module):
    def __init__(self, input_size, output_size, num_experts, hidden_size=64, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(input_size, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, output_size)
            )
            for _ in range(num_experts)
        )
        self.output_size = output_size

    def forward(self, x):
        """Return the output and the loss that keeps the experts equally busy."""
        probs = self.gate(x).softmax(dim=-1)
        weights, chosen = probs.topk(self.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = x.new_zeros(len(x), self.output_size)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out = expert(x[rows]) * weights[rows, places].unsqueeze(1)
                y = y.index_add(0, rows, out)
        load = torch.zeros_like(probs).scatter(1, chosen, 1.0).mean(dim=0)
        return y, (load * probs.mean(dim=0)).sum() * len(self.experts)


centers = 3 * torch.randn(32, 20, generator=torch.Generator().manual_seed(0))


def batch(count):
    """Return points around 32 centers; the class depends on the center and the side of it."""
    at = torch.randint(0, 32, (count,))
    away = torch.randn(count, 20)
    return centers[at] + away, (at + (away[:, 0] > 0)) % 10


model = MoE(20, 10, args.experts)
loss_fn = nn.CrossEntropyLoss()
if args.plain:
    optim = torch.optim.Adam(model.parameters(), lr=2e-3)
else:
    optim = gadei_ps.learners.torch.Optimizer(model, kind="adam", lr=2e-3)

start = time.perf_counter()
for step in range(args.steps):
    x, y = batch(args.batch_size)
    y_hat, aux_loss = model(x)
    loss = loss_fn(y_hat, y)
    optim.zero_grad()
    (loss + 0.01 * aux_loss).backward()
    optim.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.4f} + {aux_loss.item():.4f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
model.eval()
with torch.no_grad():
    x, y = batch(2000)
    print(f"test loss {loss_fn(model(x)[0], y).item():.6f}", flush=True)
