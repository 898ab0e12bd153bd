"""A model whose weights are bfloat16: a network for tagging words, AdamW with a linear schedule.

torch steps the weights in bfloat16, which rounds small steps away. A job keeps them in float32.

python bfloat16.py --plain                              # torch alone
gadei-ps run tagger --learners 2 -- python bfloat16.py  # two learners
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
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
WORDS, TAGS, WINDOW = 500, 12, 3
tag_of = torch.randint(0, TAGS, (WORDS, 3), generator=torch.Generator().manual_seed(0))


def sentences(count):
    """Return windows of three words; the tag of the middle one depends on the word before it."""
    words = torch.randint(0, WORDS, (count, WINDOW))
    return words, tag_of[words[:, 1], words[:, 0] % 3]


model = nn.Sequential(
    nn.Embedding(WORDS, 32), nn.Flatten(), nn.Linear(WINDOW * 32, 256), nn.ReLU(),
    nn.LayerNorm(256), nn.Linear(256, TAGS),
)  # fmt: skip
model = model.to(torch.bfloat16)
if args.plain:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adamw", lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(
    optimizer, start_factor=1.0, end_factor=0.1, total_iters=args.steps
)
start = time.perf_counter()
for step in range(args.steps):
    words, tags = sentences(args.batch_size)
    loss = nn.functional.cross_entropy(model(words).float(), tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
with torch.no_grad():
    words, tags = sentences(4000)
    loss = nn.functional.cross_entropy(model(words).float(), tags)
    print(f"test loss {loss.item():.6f}", flush=True)
