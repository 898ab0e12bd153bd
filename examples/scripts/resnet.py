"""A residual network with batch norm for small images, in the way of kuangliu/pytorch-cifar.

SGD with momentum and weight decay, a cosine schedule, and the best model kept in a file.

python resnet.py --plain                              # torch alone
gadei-ps run resnet --learners 2 -- python resnet.py  # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("--samples", default=1280, type=int)
parser.add_argument("--save", help="file for the best model")
parser.add_argument("--seed", default=0, type=int)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, planes=(16, 32, 64), num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, planes[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        sizes = zip((planes[0], *planes), planes, (1, 2, 2), strict=False)
        self.layers = nn.Sequential(*(BasicBlock(*one) for one in sizes))
        self.linear = nn.Linear(planes[-1], num_classes)

    def forward(self, x):
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.linear(out.mean(dim=(2, 3)))


def images(count, seed):
    """Return textures of 16 x 16 in ten directions, at any phase, in noise."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    angle = (labels * torch.pi / 10).view(-1, 1, 1)
    across = torch.arange(16).view(1, 1, 16) * angle.cos()
    down = torch.arange(16).view(1, 16, 1) * angle.sin()
    phase = 6.3 * torch.rand(count, 1, 1, generator=draw)
    waves = torch.sin(across + down + phase).unsqueeze(1)
    return waves + 1.5 * torch.randn(count, 3, 16, 16, generator=draw), labels


trainset = torch.utils.data.TensorDataset(*images(args.samples, 1))
trainloader = torch.utils.data.DataLoader(trainset, batch_size=64, shuffle=True)
inputs_test, targets_test = images(512, 2)

net = ResNet()
criterion = nn.CrossEntropyLoss()
if args.plain:
    optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        net, kind="sgd", lr=args.lr, momentum=0.9, weight_decay=5e-4
    )
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

start = time.perf_counter()
best_loss = float("inf")
for epoch in range(args.epochs):
    net.train()
    for inputs, targets in trainloader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        test_loss = criterion(net(inputs_test), targets_test).item()
    print(f"epoch {epoch + 1}: test loss {test_loss:.4f}", flush=True)
    if test_loss < best_loss:
        best_loss = test_loss
        if args.save:
            torch.save({"net": net.state_dict(), "loss": best_loss, "epoch": epoch}, args.save)
    scheduler.step()
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"best test loss {best_loss:.6f}", flush=True)
