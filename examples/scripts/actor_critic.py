"""Actor-critic on CartPole, after reinforcement_learning/actor_critic.py of pytorch/examples.

Each learner of a job acts in a world of its own.

python actor_critic.py --plain                              # torch alone
gadei-ps run actors --learners 2 -- python actor_critic.py  # two learners
"""

import argparse
import os
import time
from collections import namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from cartpole import CartPoles
from torch.distributions import Categorical

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=150)
args = parser.parse_args()

learner = int(os.environ.get("GADEI_PS_LEARNER", "0"))
env = CartPoles(1, args.seed + learner)
torch.manual_seed(args.seed + learner)

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
eps = np.finfo(np.float32).eps.item()


class Policy(nn.Module):
    """Actor and critic in one model."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
if args.plain:
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="adam", lr=1e-2)


def select_action(state):
    probs, state_value = model(torch.from_numpy(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R = 0
    policy_losses, value_losses, returns = [], [], []
    for r in model.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, R.view(1, 1)))

    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]


def main():
    running_reward = 10
    samples = 0
    start = time.perf_counter()
    for i_episode in range(1, args.episodes + 1):
        state = env.observe()
        done = False
        while not done:
            state, reward, (done,) = env.step([select_action(state)])
            model.rewards.append(float(reward[0]))
        samples += len(model.rewards)
        running_reward = 0.05 * len(model.rewards) + (1 - 0.05) * running_reward
        finish_episode()
        if i_episode % 10 == 0:
            print(f"Episode {i_episode}\tAverage reward: {running_reward:.2f}", flush=True)
    print(f"{samples} samples in {time.perf_counter() - start:.3f} s")
    print(f"average reward {running_reward:.6f}", flush=True)


if __name__ == "__main__":
    main()
