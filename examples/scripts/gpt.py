"""A small GPT, in the way of karpathy/nanoGPT.

AdamW that decays matrices only, a rate that warms up and falls as a cosine, gradients accumulated
over micro-batches and clipped, and the token embedding tied to the output layer.

python gpt.py --plain                           # torch alone
gadei-ps run gpt --learners 2 -- python gpt.py  # two learners
"""

import argparse
import math
import os
import time

import torch
import torch.nn as nn
from torch.nn import functional as F

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--seed", type=int, default=1337)
args = parser.parse_args()

batch_size, block_size, gradient_accumulation_steps = 8, 64, 2
vocab_size, n_layer, n_head, n_embd = 32, 3, 4, 96
learning_rate, min_lr, warmup_iters, grad_clip = 1e-3, 1e-4, 20, 1.0


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, n_head, C // n_head).transpose(1, 2)
            for part in self.c_attn(x).split(n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))

    def groups(self, weight_decay):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        return [
            {"params": decay, "weight_decay": weight_decay},
            {"params": nodecay, "weight_decay": 0.0},
        ]


follows = torch.randint(
    0, vocab_size, (vocab_size, vocab_size, 2), generator=torch.Generator().manual_seed(0)
)


def get_batch():
    """Return texts in which two letters determine the next one, but for one of two choices."""
    data = torch.randint(0, vocab_size, (batch_size, block_size + 1))
    choices = torch.randint(0, 2, (block_size + 1, batch_size))
    for i in range(2, block_size + 1):
        data[:, i] = follows[data[:, i - 2] // 8, data[:, i - 1], choices[i]]
    return data[:, :-1], data[:, 1:]


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, args.steps - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# Each learner of a job draws texts of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
model = GPT()
if args.plain:
    optimizer = torch.optim.AdamW(model.groups(0.1), lr=learning_rate, betas=(0.9, 0.95))
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        model, kind="adamw", groups=model.groups(0.1), lr=learning_rate, betas=(0.9, 0.95)
    )

start = time.perf_counter()
for iter_num in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(gradient_accumulation_steps):
        loss = model(*get_batch()) / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 50 == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
samples = args.steps * gradient_accumulation_steps * batch_size
print(f"{samples} samples in {time.perf_counter() - start:.3f} s")
model.eval()
torch.manual_seed(0)
with torch.no_grad():
    loss = sum(model(*get_batch()).item() for _ in range(20)) / 20
print(f"val loss {loss:.6f}", flush=True)
