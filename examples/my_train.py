"""An ordinary PyTorch script; only its optimizer line is about the parameter server.

gadei-ps run demo --learners 2 -- python examples/my_train.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

torch.manual_seed(0)
inputs = torch.randn(4000, 20)
labels = (inputs[:, :10].norm(dim=1) > inputs[:, 10:].norm(dim=1)).long()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
inputs, labels = inputs.to(device), labels.to(device)
train = TensorDataset(inputs[:3200], labels[:3200])

model = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
).to(device)
criterion = torch.nn.CrossEntropyLoss()
# optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = gadei_ps.learners.torch.Optimizer(model, kind="sgd", lr=0.01)

torch.seed()  # from here on each learner shuffles in an order of its own
for epoch in range(10):
    model.train()
    for x, y in DataLoader(train, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.report(loss=loss, samples=len(y))  # optional: for `gadei-ps status`
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(inputs[3200:]).argmax(dim=1) == labels[3200:]
    print(f"epoch {epoch + 1}: accuracy {right.float().mean():.3f}", flush=True)
