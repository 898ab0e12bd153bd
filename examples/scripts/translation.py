"""A transformer that translates, after PyTorch's tutorial on nn.Transformer.

Adam with the rate of 'Attention is all you need' by LambdaLR, Xavier's initial weights, label
smoothing, masks and padding. The language to be translated into is the other one read backwards.

python translation.py --plain                                # torch alone
gadei-ps run translate --learners 2 -- python translation.py # two learners
"""

import argparse
import math
import os
import time

import torch
import torch.nn as nn
from torch.nn import Transformer

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws sentences of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
PAD, BOS, EOS, VOCAB = 0, 1, 2, 24
EMB, HEADS, HIDDEN, WARMUP = 64, 4, 128, 100


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=64):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding)

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(1)])


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Transformer(EMB, HEADS, 2, 2, HIDDEN, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(EMB, VOCAB)
        self.src_tok_emb = nn.Embedding(VOCAB, EMB)
        self.tgt_tok_emb = nn.Embedding(VOCAB, EMB)
        self.positional_encoding = PositionalEncoding(EMB, dropout=0.1)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt):
        src_emb = self.positional_encoding(self.src_tok_emb(src) * math.sqrt(EMB))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(tgt) * math.sqrt(EMB))
        mask = Transformer.generate_square_subsequent_mask(tgt.size(1)).isinf()
        outs = self.transformer(
            src_emb,
            tgt_emb,
            tgt_mask=mask,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.generator(outs)


def sentences(count):
    """Return pairs of shape (count, 10) and (count, 12), padded."""
    src = torch.full((count, 10), PAD)
    tgt = torch.full((count, 12), PAD)
    for row, length in enumerate(torch.randint(4, 11, (count,)).tolist()):
        words = torch.randint(3, VOCAB, (length,))
        src[row, :length] = words
        tgt[row, 0], tgt[row, length + 1] = BOS, EOS
        tgt[row, 1 : length + 1] = words.flip(0)
    return src, tgt


transformer = Seq2SeqTransformer()
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
if args.plain:
    optimizer = torch.optim.Adam(transformer.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        transformer, kind="adam", lr=1.0, betas=(0.9, 0.98), eps=1e-9
    )
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: EMB**-0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5) / 4
)


def loss_of(src, tgt):
    logits = transformer(src, tgt[:, :-1])
    return loss_fn(logits.reshape(-1, VOCAB), tgt[:, 1:].reshape(-1))


transformer.train()
start = time.perf_counter()
for step in range(args.steps):
    optimizer.zero_grad()
    loss = loss_of(*sentences(args.batch_size))
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
print(f"{args.steps * args.batch_size} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
transformer.eval()
with torch.no_grad():
    print(f"val loss {loss_of(*sentences(500)).item():.6f}", flush=True)
