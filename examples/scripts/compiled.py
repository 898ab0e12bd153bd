"""A model that torch.compile has compiled: an MLP-Mixer for small images, AdamW.

python compiled.py --plain                               # torch alone
gadei-ps run compiled --learners 2 -- python compiled.py # two learners
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
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--backend", default="inductor", help="of torch.compile")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class MixerLayer(nn.Module):
    def __init__(self, patches, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.channels = nn.Sequential(nn.Linear(channels, 128), nn.GELU(), nn.Linear(128, channels))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 64, 4, stride=4)
        self.layers = nn.Sequential(MixerLayer(16, 64), MixerLayer(16, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.layers(x).mean(dim=1))


patterns = torch.rand(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def batch(count):
    labels = torch.randint(0, 10, (count,))
    return patterns[labels] + torch.randn(count, 1, 16, 16), labels


model = torch.compile(Mixer(), backend=args.backend)
if args.plain:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adamw", lr=1e-3)
loss_fn = nn.CrossEntropyLoss()

loss_fn(model(batch(args.batch_size)[0]), torch.zeros(args.batch_size).long()).backward()
optimizer.zero_grad()  # what is compiled now is not timed
start = time.perf_counter()
for step in range(args.steps):
    images, labels = batch(args.batch_size)
    optimizer.zero_grad()
    loss = loss_fn(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
model.eval()
with torch.no_grad():
    images, labels = batch(1000)
    print(f"test loss {loss_fn(model(images), labels).item():.6f}", flush=True)
