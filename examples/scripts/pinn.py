"""A physics-informed network in float64, in the way of Raissi et al.: the heat equation, Adam.

python pinn.py --plain                           # torch alone
gadei-ps run heat --learners 2 -- python pinn.py # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn

import gadei_ps.learners.torch

torch.set_default_dtype(torch.float64)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--points", type=int, default=256)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=1234)
args = parser.parse_args()

# Each learner of a job draws points of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
ALPHA = 0.1


def exact(x, t):
    return torch.exp(-ALPHA * torch.pi**2 * t) * torch.sin(torch.pi * x)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )
        for m in self.layers:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], dim=1))


def residual(u, x, t):
    """Return the residual of the heat equation at points (x, t)."""
    x, t = x.requires_grad_(True), t.requires_grad_(True)
    value = u(x, t)
    ones = torch.ones_like(value)
    u_t, u_x = torch.autograd.grad(value, (t, x), ones, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x, x, ones, create_graph=True)
    return u_t - ALPHA * u_xx


def loss_of(u):
    x, t = torch.rand(2, args.points, 1)
    border = torch.randint(0, 2, (args.points, 1)).double()
    loss_f = (residual(u, x, t) ** 2).mean()
    loss_b = (u(border, torch.rand(args.points, 1)) ** 2).mean()
    x0, t0 = torch.rand(args.points, 1), torch.zeros(args.points, 1)
    return loss_f + loss_b + ((u(x0, t0) - exact(x0, t0)) ** 2).mean()


u = Network()
if args.plain:
    optimizer = torch.optim.Adam(u.parameters(), lr=args.lr)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(u, kind="adam", lr=args.lr)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.997)
start = time.perf_counter()
for step in range(args.steps):
    optimizer.zero_grad()
    loss = loss_of(u)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
print(f"{args.steps * args.points} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
x, t = torch.rand(2, 2000, 1)
with torch.no_grad():
    error = (u(x, t) - exact(x, t)).norm() / exact(x, t).norm()
    print(f"relative error {error.item():.6f}", flush=True)
