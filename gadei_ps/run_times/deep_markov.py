"""The networks of sync/run_time_model.py in PyTorch, and the bound that their training maximises.

sync/run_time_model.py describes the architecture. Parameters have the same names as in the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gadei_ps.sync.run_time_file import Sizes
from gadei_ps.sync.run_time_model import MIN_STD


@dataclass
class Batch:
    """Scaled run times (windows, LAG, learners), which of them are known, which lower bounds."""

    times: Tensor
    known: Tensor | None
    censored: Tensor | None


class _Recurrence(nn.Module):
    """A tanh RNN whose first state is zero."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input = nn.Linear(sizes.learners, sizes.recurrent)
        self.recurrent = nn.Parameter(torch.empty(sizes.recurrent, sizes.recurrent))
        nn.init.orthogonal_(self.recurrent)

    def forward(self, windows: Tensor) -> list[Tensor]:
        first, *others = self.input(windows).unbind(1)
        states = [torch.tanh(first)]
        for seen in others:
            states.append(torch.tanh(torch.addmm(seen, states[-1], self.recurrent.T)))
        return states


def _perceptron(inner: int, hidden: int, outer: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(inner, hidden), nn.Linear(hidden, outer)])


class DeepMarkovModel(nn.Module):
    """The networks of run_time_model.py, with the same names, for training."""

    def __init__(self, sizes: Sizes, times: Tensor) -> None:
        """times: scaled run times, (iterations, learners), from which training begins."""
        super().__init__()
        z, r, h, n = sizes.latent, sizes.recurrent, sizes.hidden, sizes.learners
        self.sizes = sizes
        self.gate = _perceptron(z, h, z)
        self.proposal = _perceptron(z, h, z)
        self.linear = nn.Linear(z, z)
        self.transition_std = nn.Linear(z, z)
        self.emission = nn.Linear(z, h)
        self.run_time = nn.Linear(h, n)
        self.run_time_std = nn.Linear(h, n)
        self.left = _Recurrence(sizes)
        self.right = _Recurrence(sizes)
        self.combiner = nn.Linear(z, r)
        self.posterior = nn.Linear(r, z)
        self.posterior_std = nn.Linear(r, z)
        self.start = nn.Parameter(torch.zeros(z))
        self._begin(times)

    @torch.no_grad()
    def _begin(self, times: Tensor) -> None:
        """Initial parameters. The first prediction is each learner's own mean and deviation.

        The transition keeps the state (W = 1, b = 0), as in Krishnan et al. The input of the RNNs
        has deviation 1. Otherwise the noise of thousands of learners hides what a few of them have
        in common, and training never uses the state.
        """
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        mean, std = times.mean(0), times.std(0) + 0.01
        self.run_time.weight.mul_(0.3)
        self.run_time.bias.copy_(mean)
        self.run_time_std.weight.mul_(0.1)
        self.run_time_std.bias.copy_(std + torch.log(-torch.expm1(-std)))  # inverse of softplus
        for side in (self.left, self.right):
            taken = (times - mean) @ side.input.weight.T
            side.input.weight.div_(taken.std(0)[:, None] + 1e-3)
            side.input.bias.copy_(-side.input.weight @ mean)

    def transition(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the next states: (..., latent)."""
        gate = torch.sigmoid(self.gate[1](torch.relu(self.gate[0](states))))
        proposal = self.proposal[1](torch.relu(self.proposal[0](states)))
        mean = (1 - gate) * self.linear(states) + gate * proposal
        return mean, _std(self.transition_std(torch.relu(proposal)))

    def emit(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of run times: (..., learners)."""
        hidden = torch.relu(self.emission(states))
        return self.run_time(hidden), _std(self.run_time_std(hidden))

    def infer(self, windows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the states, given whole windows, and the states' means and deviations.

        windows: (m, lag, learners). noise: (lag, m, latent). Returns (m, lag, latent) three times.
        """
        left, right = self.left(windows), self.right(windows.flip(1))[::-1]
        state = self.start.expand(len(windows), -1)
        found = []
        for from_left, from_right, random in zip(left, right, noise, strict=True):
            hidden = (torch.tanh(self.combiner(state)) + from_left + from_right) / 3
            mean, std = self.posterior(hidden), _std(self.posterior_std(hidden))
            state = mean + std * random
            found.append((state, mean, std))
        states, means, stds = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
        return states, means, stds

    def elbo(self, batch: Batch, noise: Tensor) -> Tensor:
        """The evidence lower bound for each run time in nats, a mean over the batch.

        The expectation over states uses one draw. Given the previous state, the divergence of the
        inference network's normal distribution from the transition's is exact.
        """
        states, means, stds = self.infer(batch.times, noise)
        start = self.start.expand(len(states), 1, -1)
        prior_means, prior_stds = self.transition(torch.cat([start, states[:, :-1]], dim=1))
        divergence = (
            torch.log(prior_stds / stds)
            + (stds**2 + (means - prior_means) ** 2) / (2 * prior_stds**2)
            - 0.5
        ).sum()
        run_times, spreads = self.emit(states)
        away = (batch.times - run_times) / spreads
        likelihood = -0.5 * away**2 - torch.log(spreads) - 0.5 * math.log(2 * math.pi)
        if batch.censored is not None:
            likelihood = torch.where(batch.censored, torch.special.log_ndtr(-away), likelihood)
        if batch.known is not None:
            likelihood = torch.where(batch.known, likelihood, 0.0)
        return (likelihood.sum() - divergence) / batch.times.numel()

    def noise(self, windows: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard normal noise for this number of windows."""
        return torch.randn(self.sizes.lag, windows, self.sizes.latent, generator=generator)


def _std(values: Tensor) -> Tensor:
    return functional.softplus(values) + MIN_STD
