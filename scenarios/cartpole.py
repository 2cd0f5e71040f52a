"""Reinforcement learning with observers and an agent, as in PyTorch's rpc/rl.

Each observer simulates carts with poles in NumPy, and requests every action from the
agent, which has the policy. After an episode of all observers, one pass
differentiates the log-probabilities of all actions, weighted by their returns
(REINFORCE). The observers run concurrently, but the result does not depend on their
order: all seeds and drivers give bitwise equal actions, rewards and gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jdag
from jdag.scenario import Figures, Run, Training

FIGURES: Mapping[str, str] = {
    "first_reward": "mean number of steps that a pole stays up, first episode",
    "final_reward": "mean number of steps that a pole stays up, last episode",
}


class CartPoles:
    """Simulates several poles as Gym's CartPole does (Barto, Sutton, Anderson 1983)."""

    def __init__(self, seed: int, poles: int) -> None:
        self._random, self._poles = np.random.default_rng(seed), poles

    def reset(self) -> Any:
        """Reset all poles. Returns position, speed, angle and angular speed of each."""
        self._state = self._random.uniform(-0.05, 0.05, (4, self._poles))
        self.up = np.ones(self._poles, bool)
        return self._state.T

    def step(self, right: Any) -> Any:
        """Push each cart to the right or left for 40 ms. Returns the new states."""
        for _ in range(2):
            _, speed, angle, turning = self._state
            sine, cosine = np.sin(angle), np.cos(angle)
            push = (np.where(right, 10.0, -10.0) + 0.05 * turning**2 * sine) / 1.1
            turned = (9.8 * sine - cosine * push) / (2 / 3 - 0.05 * cosine**2 / 1.1)
            change = [speed, push - 0.05 * turned * cosine / 1.1, turning, turned]
            self._state = self._state + 0.02 * np.stack(change) * self.up
            self.up &= np.abs(self._state[0]) < 2.4
            self.up &= np.abs(self._state[2]) < np.radians(12)
        return self._state.T


def scores(policy: Mapping[str, Array], states: Array) -> Array:
    """Compute the log-probabilities of both actions in each state."""
    hidden = jnp.tanh(states @ policy["w"] + policy["b"])
    return jax.nn.log_softmax(hidden @ policy["out"])


def taken(of_both: Array, actions: Array) -> Array:
    """Select the log-probabilities of the actions taken."""
    return jnp.take_along_axis(of_both, actions[..., None], axis=-1)[..., 0]


def chosen(policy: Mapping[str, Array], states: Array, seed: Array) -> Any:
    """Draw an action for each pole. Returns (log-probabilities, actions)."""
    of_both = scores(policy, states)
    actions = jax.random.categorical(jax.random.key(seed), of_both)
    return taken(of_both, actions), actions


def loss(logs: Any, weights: Array) -> Array:
    """Return the loss of REINFORCE. Arrays have the axes observer, step and pole."""
    return -jnp.mean(jnp.asarray(logs) * weights)


@jax.jit
@jax.grad
def plain(policy: Any, states: Array, actions: Array, weights: Array) -> Array:
    """Compute the gradient of the loss of all observers by plain JAX."""
    return loss(taken(scores(policy, states), actions), weights)


@jdag.program
def episode(ctx: Any, poles: Any, policy: Any, seed: int, steps: int) -> Any:
    """Run an observer. Returns log-probabilities, states, actions and upright poles."""
    states, logs, seen = poles.reset(), [], []
    for number in range(steps):
        log, refs = ctx.call(policy["w"].worker, chosen, policy, states, seed + number)
        actions = refs.fetch()
        logs.append(log)
        seen.append((states, actions, poles.up.copy()))
        states = poles.step(actions)
    return logs, *map(np.stack, zip(*seen, strict=True))


def weighed(up: Any) -> Any:
    """Return normalized rewards-to-go. The axes are observer, step and pole."""
    returns = up.astype(float)
    for number in reversed(range(up.shape[1] - 1)):
        returns[:, number] += 0.95 * returns[:, number + 1]
    gained = (returns - returns.mean(axis=(0, 2), keepdims=True)) * up
    return gained / (gained.std() + 1e-6)


def cartpole(
    workers: Sequence[str], *, episodes: int = 8, steps: int = 32, poles: int = 16
) -> Training:
    """Make the scenario's player, with an agent and observers.

    Args:
        workers: the agent, then the observers.
        episodes: number of episodes, each followed by a step of the optimizer.
        steps: number of steps of an episode.
        poles: number of poles of each observer.
    """
    agent, *observers = workers
    draw = np.random.default_rng(0).standard_normal
    initial = {"w": draw((4, 16)), "b": np.zeros(16), "out": 0.1 * draw((16, 2))}

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        policy = cluster.put(agent, jax.tree.map(jnp.asarray, initial))
        optimizer = jdag.Optimizer(optax.adam(0.1), policy)
        hosted = [
            cluster.host(worker, CartPoles, number, poles)
            for number, worker in enumerate(observers)
        ]
        rewards, checks = [], []
        for number in range(episodes):
            begun_ns = cluster.now_ns
            with cluster.context() as ctx:
                tasks: list[Any] = []
                for env in hosted:
                    seed = steps * (len(hosted) * number + len(tasks))
                    task = ctx.start(env.worker, episode, env, policy, seed, steps)
                    tasks.append(task)
                logs, *seen = zip(*jdag.wait(tasks), strict=True)
                states, actions, up = map(np.stack, seen)
                weights = weighed(up)
                ctx.backward(ctx.call(agent, loss, logs, weights))
                truth = plain(jdag.fetch(policy), states, actions, weights)
                checks.append((jdag.fetch(ctx.gradient(policy)), truth))
                optimizer.step(ctx)
            rewards.append(float(up.sum(axis=1).mean()))
            run.keep(cluster, (begun_ns, cluster.now_ns))
            run.progress(number + 1, episodes, reward=rewards[-1])
        cluster.drop(hosted)
        return {"first_reward": rewards[0], "final_reward": rewards[-1]}, checks

    return Training(train, FIGURES)
