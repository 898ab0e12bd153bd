"""A time series predicted by an LSTM: Adam, early stopping, and the best weights at the end.

The first learner whose test error no longer improves stops the job for all learners. What
`load_state_dict` loads after training is evaluated, and does not come to the job.

python time_series.py --plain                              # torch alone
gadei-ps run series --learners 2 -- python time_series.py  # two learners
"""

import argparse
import copy
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--patience", type=int, default=3)
parser.add_argument("--length", type=int, default=1500, help="of the series")
parser.add_argument("--lookback", type=int, default=24)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

# Each learner of a job draws batches of its own.
torch.manual_seed(args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0")))


def passengers(length):
    """A series with a trend, a season and noise, scaled to 0 .. 1."""
    month = torch.arange(length).float()
    noise = torch.randn(length, generator=torch.Generator().manual_seed(0))
    series = 0.001 * month + torch.sin(month / 12 * 6.283) + 0.1 * noise
    return (series - series.min()) / (series.max() - series.min())


def windows(series):
    X = series.unfold(0, args.lookback, 1)[:-1].unsqueeze(2)
    return X, series[args.lookback :].unsqueeze(1)


class AirModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=50, num_layers=1, batch_first=True)
        self.linear = nn.Linear(50, 1)

    def forward(self, x):
        x, _ = self.lstm(x)
        return self.linear(x[:, -1])


series = passengers(args.length)
split = int(args.length * 0.67)
X_train, y_train = windows(series[:split])
X_test, y_test = windows(series[split - args.lookback :])
loader = DataLoader(TensorDataset(X_train, y_train), shuffle=True, batch_size=16)

model = AirModel()
loss_fn = nn.MSELoss()
if args.plain:
    optimizer = torch.optim.Adam(model.parameters())
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adam")


def stopping():
    return not args.plain and optimizer.client.stopping


best, best_state, waited = float("inf"), None, 0
start = time.perf_counter()
for epoch in range(1, args.epochs + 1):
    model.train()
    for X_batch, y_batch in loader:
        loss = loss_fn(model(X_batch), y_batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if stopping():  # another learner has stopped the job
            break
    model.eval()
    with torch.no_grad():
        test_rmse = loss_fn(model(X_test), y_test).sqrt().item()
    print(f"Epoch {epoch}: test RMSE {test_rmse:.4f}", flush=True)
    if test_rmse < best:
        best, best_state, waited = test_rmse, copy.deepcopy(model.state_dict()), 0
    else:
        waited += 1
    if waited == args.patience and not args.plain:
        optimizer.stop_job(f"no better test RMSE for {args.patience} epochs")
    if waited == args.patience or stopping():
        break
print(f"{epoch * len(X_train)} samples in {time.perf_counter() - start:.3f} s")
model.load_state_dict(best_state)
with torch.no_grad():
    print(f"best test RMSE {loss_fn(model(X_test), y_test).sqrt().item():.6f}", flush=True)
