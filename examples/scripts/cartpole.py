"""The pole on a cart of Barto, Sutton and Anderson (1983), many at once; as gym's CartPole-v1."""

import numpy as np


class CartPoles:
    """`count` environments. Those whose episode is over restart by themselves."""

    limit = 500  # steps of an episode

    def __init__(self, count, seed):
        self.random = np.random.default_rng(seed)
        self.state = self.random.uniform(-0.05, 0.05, (count, 4))
        self.steps = np.zeros(count, int)

    def observe(self):
        return self.state.astype(np.float32)

    def step(self, actions):
        """actions: 0 pushes to the left, 1 to the right. Returns observations, rewards, dones."""
        x, v, angle, spin = self.state.T
        force = np.where(np.asarray(actions) == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pull = push - 0.05 * turn * cos / 1.1
        self.state = np.stack(
            [x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn], axis=1
        )
        self.steps += 1
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        done = fallen | (self.steps >= self.limit)
        fresh = self.random.uniform(-0.05, 0.05, self.state.shape)
        self.state = np.where(done[:, None], fresh, self.state)
        self.steps[done] = 0
        return self.observe(), np.ones(len(done), np.float32), done
