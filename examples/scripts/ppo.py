"""Proximal policy optimization with many actors, in the way of ppo.py of vwxyzjn/cleanrl.

python ppo.py --plain                           # torch alone
gadei-ps run ppo --learners 2 -- python ppo.py  # two learners, each with actors of its own
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from cartpole import CartPoles
from torch.distributions.categorical import Categorical

import gadei_ps.learners.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="torch's own optimizer")
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--num-steps", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
gamma, gae_lambda, clip_coef, ent_coef, vf_coef, max_grad_norm = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5
batch_size = args.num_envs * args.num_steps
minibatch_size = batch_size // 4

seed = args.seed + int(os.environ.get("GADEI_PS_LEARNER", "0"))
random = np.random.default_rng(seed)
torch.manual_seed(seed)


def layer_init(layer, std=2**0.5):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


def mlp(outputs, std):
    hidden = layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std=std))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = mlp(1, 1.0)
        self.actor = mlp(2, 0.01)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


envs = CartPoles(args.num_envs, seed)
agent = Agent()
if args.plain:
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
else:
    optimizer = gadei_ps.learners.torch.Optimizer(
        agent, kind="adam", lr=args.learning_rate, eps=1e-5
    )

obs = torch.zeros((args.num_steps, args.num_envs, 4))
actions, logprobs, rewards, dones, values = torch.zeros((5, args.num_steps, args.num_envs))
next_obs, next_done = torch.from_numpy(envs.observe()), torch.zeros(args.num_envs)
start = time.perf_counter()
for iteration in range(args.iterations):
    optimizer.param_groups[0]["lr"] = (1 - iteration / args.iterations) * args.learning_rate
    for step in range(args.num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
        observed, reward, done = envs.step(action.numpy())
        rewards[step] = torch.from_numpy(reward)
        next_obs, next_done = torch.from_numpy(observed), torch.from_numpy(done).float()

    with torch.no_grad():
        next_value = agent.critic(next_obs).flatten()
    advantages = torch.zeros_like(rewards)
    lastgaelam = 0
    for t in reversed(range(args.num_steps)):
        last = t == args.num_steps - 1
        goes_on = 1.0 - (next_done if last else dones[t + 1])
        delta = rewards[t] + gamma * (next_value if last else values[t + 1]) * goes_on - values[t]
        advantages[t] = lastgaelam = delta + gamma * gae_lambda * goes_on * lastgaelam
    returns = advantages + values

    b_obs, b_actions = obs.reshape(-1, 4), actions.reshape(-1)
    b_logprobs, b_advantages = logprobs.reshape(-1), advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    b_inds = np.arange(batch_size)
    for _ in range(4):
        random.shuffle(b_inds)
        for begin in range(0, batch_size, minibatch_size):
            mb = b_inds[begin : begin + minibatch_size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            adv = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
            loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
    if iteration % 10 == 9:
        length = batch_size / max(1.0, dones.sum().item())
        print(f"iteration {iteration + 1}: episodes of {length:.1f} steps", flush=True)
print(f"{args.iterations * batch_size} samples in {time.perf_counter() - start:.3f} s")
print(f"steps of an episode {batch_size / max(1.0, dones.sum().item()):.6f}", flush=True)
