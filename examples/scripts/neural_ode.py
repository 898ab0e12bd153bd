"""A neural ordinary differential equation, after ode_demo.py of rtqichen/torchdiffeq: RMSprop.

python neural_ode.py --plain                              # torch alone
gadei-ps run spiral --learners 2 -- python neural_ode.py  # two learners
"""

import argparse
import itertools
import os
import time

import torch
import torch.nn as nn
import torch.optim as optim

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--data_size", type=int, default=500)
parser.add_argument("--batch_time", type=int, default=8)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--niters", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
true_y0 = torch.tensor([[2.0, 0.0]])
t = torch.linspace(0.0, 25.0, args.data_size)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


def odeint(func, y0, t):
    """Runge and Kutta's method of fourth order."""
    ys = [y0]
    for now, then in itertools.pairwise(t):
        h, y = then - now, ys[-1]
        k1 = func(now, y)
        k2 = func(now + h / 2, y + h / 2 * k1)
        k3 = func(now + h / 2, y + h / 2 * k2)
        k4 = func(then, y + h * k3)
        ys.append(y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return torch.stack(ys)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t)


def get_batch():
    s = torch.randperm(args.data_size - args.batch_time)[: args.batch_size]
    batch_y = torch.stack([true_y[s + i] for i in range(args.batch_time)], dim=0)
    return true_y[s], t[: args.batch_time], batch_y


func = ODEFunc()
if args.plain:
    optimizer = optim.RMSprop(func.parameters(), lr=1e-3)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(func, like=optim.RMSprop, lr=1e-3)
start = time.perf_counter()
for itr in range(1, args.niters + 1):
    optimizer.zero_grad()
    batch_y0, batch_t, batch_y = get_batch()
    pred_y = odeint(func, batch_y0, batch_t)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    if itr % 50 == 0:
        print(f"Iter {itr:04d} | Loss {loss.item():.6f}", flush=True)
print(f"{args.niters * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
with torch.no_grad():
    pred_y = odeint(func, true_y0, t)
    print(f"total loss {torch.mean(torch.abs(pred_y - true_y)).item():.6f}", flush=True)
