"""Sine waves continued by an LSTM, after time_sequence_prediction of pytorch/examples.

Everything in float64, and LBFGS, which calls the script back for several gradients in each step. No
job can do that: the changed line ends with an error that says so.

python time_sequence_prediction.py --plain      # torch alone
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.optim as optim

import gadei_ps.learners.torch


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 51)
        self.lstm2 = nn.LSTMCell(51, 51)
        self.linear = nn.Linear(51, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = torch.zeros(4, input.size(0), 51, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--waves", type=int, default=20)
    parser.add_argument("--length", type=int, default=60)
    opt = parser.parse_args()
    torch.manual_seed(0)
    begin = torch.randint(-80, 80, (opt.waves, 1))
    data = torch.sin((torch.arange(opt.length) + begin).double() / 20)
    input, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]

    seq = Sequence()
    seq.double()
    criterion = nn.MSELoss()
    if opt.plain:
        optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    else:
        optimizer = gadei_ps.learners.torch.Optimizer(seq, like=optim.LBFGS, lr=0.8)
    start = time.perf_counter()
    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(input), target)
            loss.backward()
            return loss

        print(f"step {i}: loss {optimizer.step(closure).item():.6f}", flush=True)
    print(f"{opt.steps * opt.waves} samples in {time.perf_counter() - start:.3f} s")
    with torch.no_grad():
        print(f"test loss {criterion(seq(test_input), test_target).item():.6f}", flush=True)
