"""A variational autoencoder, after vae of pytorch/examples: Adam.

python vae.py --plain                           # torch alone
gadei-ps run vae --learners 2 -- python vae.py  # two learners
"""

import argparse
import os
import time

import torch
from torch import nn, optim
from torch.nn import functional as F

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=12800)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


def images(count, seed):
    """A bright disc somewhere on 28 x 28 pixels."""
    draw = torch.Generator().manual_seed(seed)
    at = 6 + 16 * torch.rand(count, 2, 1, 1, generator=draw)
    size = 3 + 3 * torch.rand(count, 1, 1, generator=draw)
    pixels = torch.arange(28.0)
    far = (pixels.view(1, 28, 1) - at[:, 0]) ** 2 + (pixels.view(1, 1, 28) - at[:, 1]) ** 2
    return torch.sigmoid(size - far.sqrt())


train_loader = torch.utils.data.DataLoader(
    images(args.samples, 1), batch_size=args.batch_size, shuffle=True
)
test_loader = torch.utils.data.DataLoader(images(1280, 2), batch_size=args.batch_size)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE()
if args.plain:
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adam", lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    """Reconstruction and KL divergence, summed over all elements and the batch."""
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    train_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / args.samples:.4f}", flush=True)


def test():
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    return test_loss / len(test_loader.dataset)


if __name__ == "__main__":
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        train(epoch)
    print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
    torch.manual_seed(0)
    print(f"test loss {test():.6f}", flush=True)
