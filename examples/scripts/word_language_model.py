"""An LSTM that predicts the next word, after word_language_model of pytorch/examples.

Tied weights, truncated backpropagation, clipped gradients, and a rate that is divided by four when
the loss on held-out text does not fall.

python word_language_model.py --plain                            # torch alone
gadei-ps run words --learners 2 -- python word_language_model.py # two learners
"""

import argparse
import math
import os
import time

import torch
import torch.nn as nn

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--words", type=int, default=100, help="size of the vocabulary")
parser.add_argument("--nhid", type=int, default=100)
parser.add_argument("--lr", type=float, default=20.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--length", type=int, default=40000, help="words of text")
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--bptt", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1111)
args = parser.parse_args()

learner = int(os.environ.get("GADEI_PS_LEARNER", "0"))
torch.manual_seed(args.seed + learner)


def text(length, seed):
    """Return words, each of which has four that may follow it."""
    draw = torch.Generator().manual_seed(0)
    follows = torch.randint(0, args.words, (args.words, 4), generator=draw).tolist()
    choices = torch.randint(0, 4, (length,), generator=draw.manual_seed(seed)).tolist()
    words = [0]
    for choice in choices:
        words.append(follows[words[-1]][choice])
    return torch.tensor(words)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, ntoken, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid, 2, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output))
        return decoded.view(-1, decoded.size(-1)), hidden

    def init_hidden(self, bsz):
        zeros = torch.zeros(2, bsz, self.rnn.hidden_size)
        return zeros, zeros.clone()


# Each learner of a job reads a text of its own.
train_data = batchify(text(args.length, 1 + learner), args.batch_size)
val_data = batchify(text(4000, 1000), 10)
model = RNNModel(args.words, args.nhid, args.dropout)
criterion = nn.CrossEntropyLoss()
if args.plain:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="sgd", lr=args.lr)


def chunks(source):
    for i in range(0, source.size(0) - 1, args.bptt):
        seq_len = min(args.bptt, len(source) - 1 - i)
        yield source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for data, targets in chunks(source):
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


def train():
    model.train()
    hidden = model.init_hidden(args.batch_size)
    for data, targets in chunks(train_data):
        optimizer.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()


start = time.perf_counter()
best_val_loss = None
for epoch in range(1, args.epochs + 1):
    train()
    val_loss = evaluate(val_data)
    print(f"epoch {epoch}: valid ppl {math.exp(val_loss):.2f}", flush=True)
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
print(f"{args.epochs * args.length} samples in {time.perf_counter() - start:.3f} s")
print(f"valid loss {val_loss:.6f}", flush=True)
