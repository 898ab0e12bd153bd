"""Sorting texts with an EmbeddingBag, after PyTorch's tutorial on text classification.

SGD with a high rate that falls when accuracy does not rise, clipped gradients, and batches of texts
of unequal length.

python text_classifier.py --plain                              # torch alone
gadei-ps run news --learners 2 -- python text_classifier.py    # two learners
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--vocab-size", type=int, default=2000)
parser.add_argument("--samples", type=int, default=8000)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
NUM_CLASS, EMSIZE = 4, 64


def texts(count, seed):
    """Return labels, and words of which about one in six is of the label's own topic."""
    topic = args.vocab_size // 20
    draw = torch.Generator().manual_seed(seed)
    found = []
    for label in torch.randint(0, NUM_CLASS, (count,), generator=draw).tolist():
        length = int(torch.randint(5, 40, (1,), generator=draw))
        words = torch.randint(0, args.vocab_size, (length,), generator=draw)
        own = torch.randint(0, topic, (length,), generator=draw) + label * topic
        found.append((label, torch.where(torch.rand(length, generator=draw) < 0.5, own, words)))
    return found


def collate_batch(batch):
    labels = torch.tensor([label for label, _ in batch])
    offsets = torch.tensor([0, *(len(words) for _, words in batch)])[:-1].cumsum(dim=0)
    return labels, torch.cat([words for _, words in batch]), offsets


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


model = TextClassificationModel(args.vocab_size, EMSIZE, NUM_CLASS)
criterion = torch.nn.CrossEntropyLoss()
if args.plain:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="sgd", lr=args.lr)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.1)


def train(dataloader):
    model.train()
    for label, text, offsets in dataloader:
        optimizer.zero_grad()
        loss = criterion(model(text, offsets), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def evaluate(dataloader):
    model.eval()
    total_acc, total_loss = 0, 0.0
    with torch.no_grad():
        for label, text, offsets in dataloader:
            predicted = model(text, offsets)
            total_loss += criterion(predicted, label).item() * len(label)
            total_acc += (predicted.argmax(1) == label).sum().item()
    return total_acc / len(dataloader.dataset), total_loss / len(dataloader.dataset)


options = {"batch_size": args.batch_size, "collate_fn": collate_batch}
train_dataloader = DataLoader(texts(args.samples, 1), shuffle=True, **options)
valid_dataloader = DataLoader(texts(1000, 2), **options)
total_accu = None
start = time.perf_counter()
for epoch in range(1, args.epochs + 1):
    train(train_dataloader)
    accu_val, loss_val = evaluate(valid_dataloader)
    if total_accu is not None and total_accu > accu_val:
        scheduler.step()
    else:
        total_accu = accu_val
    print(f"end of epoch {epoch}: valid accuracy {accu_val:.3f}", flush=True)
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"valid loss {loss_val:.6f}", flush=True)
