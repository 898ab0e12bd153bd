"""A denoising autoencoder in mixed precision, in the way of PyTorch's recipe: autocast, GradScaler.

python mixed_precision.py --plain                               # torch alone
gadei-ps run denoise --learners 2 -- python mixed_precision.py  # two learners
"""

import argparse
import os
import time

import torch
from torch import nn

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
shapes = torch.rand(20, 400, generator=torch.Generator().manual_seed(0))

net = nn.Sequential(
    nn.Linear(400, 256), nn.ReLU(), nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 256), nn.ReLU(),
    nn.Linear(256, 400),
)  # fmt: skip
loss_fn = nn.MSELoss()
if args.plain:
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-5)
else:
    opt = gadei_ps.learners.torch.Optimizer(net, kind="adam", lr=1e-3, weight_decay=1e-5)
scaler = torch.amp.GradScaler("cpu")


def pictures(count):
    """Return mixtures of two shapes, without noise and with it."""
    first, second = torch.randint(0, 20, (2, count))
    clean = (shapes[first] + shapes[second]) / 2
    return clean, clean + 0.3 * torch.randn(clean.shape)


start = time.perf_counter()
for step in range(args.steps):
    clean, noisy = pictures(args.batch_size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(noisy)
        loss = loss_fn(output.float(), clean)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.5f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
with torch.no_grad():
    clean, noisy = pictures(1000)
    print(f"test loss {loss_fn(net(noisy), clean).item():.6f}", flush=True)
