"""Deep Q-learning on CartPole, after PyTorch's tutorial on reinforcement learning.

AdamW with amsgrad, gradients clipped by value, and a target network that follows slowly. A job has
no amsgrad, so that each learner has the optimizer and the job adds what it changes.

python dqn.py --plain                           # torch alone
gadei-ps run dqn --learners 2 -- python dqn.py  # two learners, each with a memory of its own
"""

import argparse
import math
import os
import random
import time
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from cartpole import CartPoles

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--steps", type=int, default=4000)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

BATCH_SIZE, GAMMA, TAU, LR = 128, 0.99, 0.005, 1e-3
EPS_START, EPS_END, EPS_DECAY = 0.9, 0.05, 1000

learner = int(os.environ.get("GADEI_PS_LEARNER", "0"))
random.seed(args.seed + learner)
torch.manual_seed(args.seed + learner)
env = CartPoles(1, args.seed + learner)

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward", "done"))


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(4, 128)
        self.layer2 = nn.Linear(128, 128)
        self.layer3 = nn.Linear(128, 2)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.layer3(x)


policy_net = DQN()
if args.plain:
    optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
else:
    optimizer = gadei_ps.learners.torch.LocalOptimizer(
        policy_net, lambda parameters: optim.AdamW(parameters, lr=LR, amsgrad=True)
    )
target_net = DQN()
target_net.load_state_dict(policy_net.state_dict())
memory = deque(maxlen=10000)


def select_action(state, steps_done):
    threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-steps_done / EPS_DECAY)
    if random.random() > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*map(torch.cat, zip(*random.sample(memory, BATCH_SIZE), strict=True)))
    state_action_values = policy_net(batch.state).gather(1, batch.action)
    with torch.no_grad():
        next_state_values = target_net(batch.next_state).max(1).values * ~batch.done
    expected = next_state_values * GAMMA + batch.reward
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


start = time.perf_counter()
lengths, length = [], 0
state = torch.from_numpy(env.observe())
for step in range(args.steps):
    action = select_action(state, step)
    observation, reward, done = env.step(action.view(1).numpy())
    next_state = torch.from_numpy(observation)
    done = torch.from_numpy(done)
    memory.append(Transition(state, action, next_state, torch.from_numpy(reward), done))
    state = next_state
    optimize_model()

    target_net_state_dict = target_net.state_dict()
    policy_net_state_dict = policy_net.state_dict()
    for key in policy_net_state_dict:
        target_net_state_dict[key] = policy_net_state_dict[key] * TAU + target_net_state_dict[
            key
        ] * (1 - TAU)
    target_net.load_state_dict(target_net_state_dict)

    length += 1
    if done:
        lengths.append(length)
        length = 0
        if len(lengths) % 20 == 0:
            print(f"episode {len(lengths)}: {sum(lengths[-20:]) / 20:.1f} steps", flush=True)
print(f"{args.steps} samples in {time.perf_counter() - start:.3f} s")
print(f"steps of the last 10 episodes {sum(lengths[-10:]) / 10:.6f}", flush=True)
