"""Two networks against each other, after dcgan of pytorch/examples: an optimizer for each.

`gadei-ps run` serves the discriminator's job. The generator is another model, so that it needs a
job of its own, whose name --generator takes:

python gan.py --plain                                                     # torch alone
: > generator.toml; gadei-ps serve generator.toml                         # in another terminal
gadei-ps run gan --learners 2 -- python gan.py --generator generator      # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.optim as optim

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizers")
parser.add_argument("--generator", help="the generator's job")
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--niter", type=int, default=300, help="mini-batches")
parser.add_argument("--lr", type=float, default=0.0005)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=0)
opt = parser.parse_args()

# Each learner of a job draws images and noise of its own.
torch.manual_seed(opt.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
nz, nf = 16, 16


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, nf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(nf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(nf * 2, nf, 4, 2, 1, bias=False),
    nn.BatchNorm2d(nf),
    nn.ReLU(True),
    nn.ConvTranspose2d(nf, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netG.apply(weights_init)
netD = nn.Sequential(
    nn.Conv2d(1, nf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(nf, nf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(nf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(nf * 2, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
    nn.Flatten(0),
)
netD.apply(weights_init)
criterion = nn.BCELoss()
if opt.plain:
    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
else:
    adam = {"kind": "adam", "lr": opt.lr, "betas": (opt.beta1, 0.999)}
    optimizerD = gadei_ps.learners.torch.Optimizer(netD, **adam)
    optimizerG = gadei_ps.learners.torch.Optimizer(netG, opt.generator, **adam)


def images(count):
    """Bright squares of 6 to 10 pixels on 16 x 16."""
    x = -torch.ones(count, 1, 16, 16)
    for image, (side, row, column) in zip(x, torch.randint(0, 5, (count, 3)), strict=True):
        image[:, row + 1 : row + 7 + side, column + 1 : column + 7 + side] = 1.0
    return x


start = time.perf_counter()
for i in range(opt.niter):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    label = torch.ones(opt.batchSize)
    errD_real = criterion(netD(images(opt.batchSize)), label)
    errD_real.backward()
    fake = netG(torch.randn(opt.batchSize, nz, 1, 1))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(opt.batchSize))
    errD_fake.backward()
    optimizerD.step()
    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    if i % 50 == 0:
        loss = (errD_real + errD_fake).item()
        print(f"[{i}/{opt.niter}] Loss_D: {loss:.4f} Loss_G: {errG.item():.4f}", flush=True)
print(f"{opt.niter * opt.batchSize} samples in {time.perf_counter() - start:.3f} s")
torch.manual_seed(0)
netG.eval()
with torch.no_grad():  # how far the mean image is from that of the squares
    far = (netG(torch.randn(500, nz, 1, 1)).mean(0) - images(500).mean(0)).abs().mean()
print(f"distance of mean images {far.item():.6f}", flush=True)
