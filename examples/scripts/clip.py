"""Pictures and captions brought together by two encoders, in the way of simple CLIP repositories.

AdamW with a rate for each encoder and for the projections, and ReduceLROnPlateau.

python clip.py --plain                           # torch alone
gadei-ps run clip --learners 2 -- python clip.py # two learners
"""

import argparse
import itertools
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=3200)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class ProjectionHead(nn.Module):
    def __init__(self, embedding_dim, projection_dim=32, dropout=0.1):
        super().__init__()
        self.projection = nn.Linear(embedding_dim, projection_dim)
        self.fc = nn.Linear(projection_dim, projection_dim)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(projection_dim)

    def forward(self, x):
        projected = self.projection(x)
        x = self.dropout(self.fc(F.gelu(projected)))
        return self.layer_norm(x + projected)


class CLIPModel(nn.Module):
    def __init__(self, temperature=1.0):
        super().__init__()
        self.image_encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 64),
        )  # fmt: skip
        self.text_encoder = nn.EmbeddingBag(64, 64)
        self.image_projection = ProjectionHead(64)
        self.text_projection = ProjectionHead(64)
        self.temperature = temperature

    def forward(self, images, captions):
        image_embeddings = self.image_projection(self.image_encoder(images))
        text_embeddings = self.text_projection(self.text_encoder(captions))
        logits = text_embeddings @ image_embeddings.T / self.temperature
        images_similarity = image_embeddings @ image_embeddings.T
        texts_similarity = text_embeddings @ text_embeddings.T
        targets = F.softmax((images_similarity + texts_similarity) / 2 * self.temperature, dim=-1)
        texts_loss = F.cross_entropy(logits, targets)
        images_loss = F.cross_entropy(logits.T, targets.T)
        return (images_loss + texts_loss) / 2


def pairs(count, seed):
    """Return pictures with four things in them, and captions that name these."""
    things = torch.rand(64, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    captions = torch.randint(0, 64, (count, 4), generator=draw)
    pictures = things[captions].mean(dim=1)
    return TensorDataset(pictures + 0.1 * torch.randn(pictures.shape, generator=draw), captions)


train_loader = DataLoader(pairs(args.samples, 1), batch_size=32, shuffle=True)
valid_loader = DataLoader(pairs(640, 2), batch_size=32)
model = CLIPModel()
params = [
    {"params": model.image_encoder.parameters(), "lr": 1e-3},
    {"params": model.text_encoder.parameters(), "lr": 3e-3},
    {
        "params": itertools.chain(
            model.image_projection.parameters(), model.text_projection.parameters()
        ),
        "lr": 1e-3,
        "weight_decay": 1e-3,
    },
]
if args.plain:
    optimizer = torch.optim.AdamW(params, weight_decay=0.0)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        model, kind="adamw", groups=params, weight_decay=0.0
    )
lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.8)

start = time.perf_counter()
for epoch in range(args.epochs):
    model.train()
    for images, captions in train_loader:
        loss = model(images, captions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [model(images, captions).item() for images, captions in valid_loader]
    valid_loss = sum(losses) / len(losses)
    lr_scheduler.step(valid_loss)
    print(f"epoch {epoch + 1}: valid loss {valid_loss:.4f}", flush=True)
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"valid loss {valid_loss:.6f}", flush=True)
