"""Recovery on processes: the same calls, and processes that are started anew."""

import os
import signal

import jdag
from tests.recovery_cases import WORKERS, train
from tests.tiers import sized

STEPS = 20


def test_a_training_whose_workers_are_killed_ends_with_the_bits_of_a_quiet_run():
    victims = dict(list({2: "b", 9: "d", 14: "c", 15: "b"}.items())[: sized(2, 4)])
    kills = len(victims)
    with jdag.simulate(WORKERS, seed=0, recover=True) as cluster:
        quiet, _ = train(cluster, STEPS)
    with jdag.launch(
        WORKERS, device="cpu", recover=True, allow=["tests.recovery_cases"]
    ) as cluster:
        pids = cluster.driver.launch.pids

        def kill(step: int) -> None:
            if step in victims:
                victim = victims.pop(step)
                os.kill(cluster.driver.launch.pids[victim], signal.SIGKILL)

        found, losses = train(cluster, STEPS, kill)
        assert found == quiet
        assert kills <= losses <= 2 * kills
        assert cluster.driver.launch.pids != pids
        assert len(cluster.driver.launch.alive) == 3
