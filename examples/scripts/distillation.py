"""A small network learns from a large one, after PyTorch's tutorial on knowledge distillation.

python distillation.py --plain                               # torch alone
gadei-ps run student --learners 2 -- python distillation.py  # two learners
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=3200)
parser.add_argument("--teacher-epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


def network(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(width * 16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


def images(count, seed):
    """Ten patterns of 16 x 16 in noise."""
    patterns = torch.rand(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    noise = 0.7 * torch.randn(count, 1, 16, 16, generator=draw)
    return TensorDataset(2 * patterns[labels] + noise, labels)


train_loader = DataLoader(images(args.samples, 1), batch_size=64, shuffle=True)
test_loader = DataLoader(images(1000, 2), batch_size=500)


def train_teacher(model, epochs, learning_rate):
    """Every learner of a job makes the same teacher, which is not a part of the job."""
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def train_knowledge_distillation(teacher, student, learning_rate, T, soft_weight, hard_weight):
    ce_loss = nn.CrossEntropyLoss()
    if args.plain:
        optimizer = optim.Adam(student.parameters(), lr=learning_rate)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(student, kind="adam", lr=learning_rate)
    teacher.eval()
    student.train()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            divergence = soft_targets * (soft_targets.log() - soft_prob)
            soft_targets_loss = divergence.sum() / len(inputs) * T**2
            loss = soft_weight * soft_targets_loss + hard_weight * ce_loss(student_logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"epoch {epoch + 1}: loss {running_loss / len(train_loader):.4f}", flush=True)


def test(model):
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs), labels).item() for inputs, labels in test_loader]
    return sum(losses) / len(losses)


torch.manual_seed(42)
teacher = network(32)
train_teacher(teacher, args.teacher_epochs, 1e-3)
# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))
student = network(8)
start = time.perf_counter()
train_knowledge_distillation(teacher, student, 1e-3, T=2, soft_weight=0.25, hard_weight=0.75)
print(f"{args.epochs * args.samples} samples in {time.perf_counter() - start:.3f} s")
print(f"teacher's test loss {test(teacher):.4f}")
print(f"test loss {test(student):.6f}", flush=True)
