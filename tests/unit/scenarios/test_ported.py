"""The scenarios that PyTorch's examples have become: their parts, and how they fail."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from cartpole import CartPoles, loss, taken, weighed
from ddp_with_rpc import ddp_with_rpc
from remote_embedding import counted
from tests.tools.scenario_cases import Stage


def test_poles_obey_the_equations_of_motion():
    """Those of a cart of 1 kg and a pole of 0.1 kg and 1 m, as a linear system."""
    poles = CartPoles(0, 3)
    poles.reset()
    state = np.array([[0, 0.1, -1], [0, 1, -2], [0, 0.1, -0.15], [0, -0.5, 1.0]])
    poles._state, pushes = state, [10.0, -10.0, 10.0]
    found = poles.step(np.array([1, 0, 1]))
    for begin, force, got in zip(state.T, pushes, found, strict=True):
        now = begin
        for _ in range(2):  # Twice 20 ms, by Euler.
            _, v, a, w = now
            mass = [[1.1, 0.05 * np.cos(a)], [np.cos(a), 2 / 3]]
            forces = [force + 0.05 * w**2 * np.sin(a), 9.8 * np.sin(a)]
            dv, dw = np.linalg.solve(mass, forces)
            now = now + 0.02 * np.array([v, dv, w, dw])
        np.testing.assert_allclose(got, now, rtol=1e-12)
    assert found[0][1] == pytest.approx(2 * 0.1951219512)  # As Gym's, from rest.


def test_a_pole_that_has_fallen_stays_where_it_is():
    poles = CartPoles(0, 2)
    poles.reset()
    poles._state = np.array([[0, 2.399], [0, 5.0], [0, 0], [0, 0]])
    states = poles.step(np.array([1, 1]))
    assert poles.up.tolist() == [True, False]
    after = poles.step(np.array([1, 1]))
    assert np.all(after[0] != states[0]) and np.all(after[1] == states[1])
    assert np.all(np.abs(poles.reset()) <= 0.05) and poles.up.all()


def test_an_action_is_weighed_by_the_rewards_after_it():
    up = np.array([[[1, 1], [1, 0], [1, 0]]], bool)
    returns = np.array([[1 + 0.95 * 1.95, 1.0], [1.95, 0.0], [1.0, 0.0]])
    apart = (returns - returns.mean(axis=1, keepdims=True)) * up[0]
    np.testing.assert_allclose(weighed(up)[0], apart / apart.std(), rtol=1e-5)
    logs = [[jnp.array([-1.0, -2.0]), jnp.array([-3.0, -4.0])]]
    assert loss(logs, jnp.array([[[1.0, 0.0], [2.0, 1.0]]])) == 11 / 4
    of_both = jnp.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    np.testing.assert_array_equal(
        taken(of_both, jnp.array([1, 0, 1])), jnp.array([0.2, 0.3, 0.6])
    )


def test_sequences_count_on_from_window_to_window():
    windows = counted(5, 6)
    assert windows.shape == (5, 48, 7)
    np.testing.assert_array_equal(windows[:-1, :, -1], windows[1:, :, 0])
    whole = np.concatenate([*windows[:, :, :-1]], axis=1)
    steps = np.diff(whole, axis=1) % 12
    assert np.all(steps == steps[:, :1])
    for of_window in windows:  # A token says nothing of the step.
        pairs = zip(of_window[:, 0].tolist(), steps[:, 0].tolist(), strict=True)
        assert sorted(pairs) == [(n, step) for n in range(12) for step in range(1, 5)]


def test_without_the_sum_replicas_are_not_equal_and_gradients_not_right(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(jdag.Cluster, "all_reduce", lambda _, tree: jdag.fetch(tree))
    workers = ["ps", "trainer0", "trainer1", "trainer2"]
    figures = ddp_with_rpc(workers, steps=2).play(Stage(workers))
    assert figures["replicas_equal"] is False
    assert figures["gradient_difference"] > 0.1
