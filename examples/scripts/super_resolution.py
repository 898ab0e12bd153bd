"""Images made twice as large, after super_resolution of pytorch/examples: Adam, pixel shuffle.

python super_resolution.py --plain                              # torch alone
gadei-ps run larger --learners 2 -- python super_resolution.py  # two learners
"""

import argparse
import os
import time
from math import log10

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.init as init
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nEpochs", type=int, default=3)
parser.add_argument("--images", type=int, default=640)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(opt.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 32, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(32, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))

    def _initialize_weights(self):
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


def pictures(count, seed):
    """Return stripes of any width and direction on 32 x 32 pixels, and the same made smaller."""
    draw = torch.Generator().manual_seed(seed)
    angle, width, phase = torch.rand(3, count, 1, 1, generator=draw) * 3.14
    pixels = torch.arange(32.0)
    along = pixels.view(1, 1, 32) * angle.cos() + pixels.view(1, 32, 1) * angle.sin()
    target = (torch.sin(along / (0.5 + width) + phase) > 0).float().unsqueeze(1)
    return TensorDataset(F.avg_pool2d(target, opt.upscale_factor), target)


training_data_loader = DataLoader(pictures(opt.images, 1), opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(pictures(100, 2), 10)
model = Net(opt.upscale_factor)
criterion = nn.MSELoss()
if opt.plain:
    optimizer = optim.Adam(model.parameters(), lr=opt.lr)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adam", lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for input, target in training_data_loader:
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    average = epoch_loss / len(training_data_loader)
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {average:.4f}", flush=True)


def test():
    total = 0
    with torch.no_grad():
        for input, target in testing_data_loader:
            total += criterion(model(input), target).item()
    return total / len(testing_data_loader)


start = time.perf_counter()
for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
print(f"{opt.nEpochs * opt.images} samples in {time.perf_counter() - start:.3f} s")
mse = test()
print(f"===> Avg. PSNR: {10 * log10(1 / mse):.4f} dB")
print(f"test loss {mse:.6f}", flush=True)
