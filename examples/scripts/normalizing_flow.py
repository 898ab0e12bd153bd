"""A normalizing flow of affine couplings (RealNVP), and an average of its weights: Adam, EMA.

python normalizing_flow.py --plain                              # torch alone
gadei-ps run flow --learners 2 -- python normalizing_flow.py    # two learners
"""

import argparse
import math
import os
import time

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--decay", type=float, default=0.98, help="of the average")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class Coupling(nn.Module):
    """Moves one coordinate by what a network makes of the other."""

    def __init__(self, first, hidden=64):
        super().__init__()
        self.first = first
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 2),
        )  # fmt: skip

    def forward(self, x):
        kept, moved = x[:, self.first], x[:, 1 - self.first]
        log_scale, shift = self.net(kept.unsqueeze(1)).unbind(dim=1)
        log_scale = torch.tanh(log_scale)
        moved = moved * log_scale.exp() + shift
        pair = (kept, moved) if self.first == 0 else (moved, kept)
        return torch.stack(pair, dim=1), log_scale


class RealNVP(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(number % 2) for number in range(layers))

    def forward(self, x):
        """The logarithm of the density at each point."""
        log_det = torch.zeros(len(x))
        for coupling in self.couplings:
            x, change = coupling(x)
            log_det = log_det + change
        return -0.5 * (x**2).sum(dim=1) - math.log(2 * math.pi) + log_det


def two_moons(count):
    upper = torch.rand(count) < 0.5
    angle = math.pi * torch.rand(count)
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], dim=1) + 0.1 * torch.randn(count, 2)


model = RealNVP()
if args.plain:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adam", lr=1e-3, weight_decay=1e-5)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.decay))

start = time.perf_counter()
for it in range(args.steps):
    optimizer.zero_grad()
    loss = -model(two_moons(args.batch_size)).mean()
    loss.backward()
    optimizer.step()
    ema_model.update_parameters(model)
    if it % 100 == 99:
        print(f"iteration {it + 1}: loss {loss.item():.4f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
with torch.no_grad():
    x = two_moons(5000)
    print(f"loss of the last weights {-model(x).mean().item():.4f}")
    print(f"loss of the average {-ema_model(x).mean().item():.6f}", flush=True)
