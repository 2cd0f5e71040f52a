"""Recovery on processes: the same calls, and processes that are started anew."""

import os
import signal
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

import jdag
from jdag.rpc.launch import Launch
from tests.recovery_cases import WORKERS, Patient, live, train
from tests.rpc_workers import Workers

STEPS = 20


@pytest.mark.second
def test_a_training_whose_workers_are_killed_ends_with_the_bits_of_a_quiet_run():
    victims = {2: "b", 9: "d", 14: "c", 15: "b"}
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


class Deadly(Patient):
    """Before some of what is done, it kills a worker."""

    def __init__(self, *args: Any, kills: dict[int, Any]) -> None:
        super().__init__(*args)
        self._kills = kills
        self._done = 0

    def __call__(self, do: Any, *args: Any, **kwargs: Any) -> Any:
        self._done += 1
        if self._done in self._kills:
            self._kills.pop(self._done)()
        return super().__call__(do, *args, **kwargs)


@pytest.mark.second
def test_open_contexts_go_on_when_workers_of_a_file_join_again():
    with jdag.simulate(WORKERS, seed=0, recover=True) as cluster:
        quiet = live(cluster, Patient(cluster, cluster.recover), 1, None)
    workers = Workers(WORKERS)
    with ExitStack() as stack:
        stack.callback(workers.close)
        launches = dict.fromkeys(WORKERS[1:], workers.launch)
        addresses = dict(workers.launch.addresses)
        path, killed = workers.path, list[str]()
        cluster = jdag.connect(path, name="a", recover=True)
        stack.enter_context(cluster)

        def kill(victim: str) -> None:
            os.kill(launches[victim].pids[victim], signal.SIGKILL)
            killed.append(victim)

        def recover() -> None:
            for victim in killed:  # Another process, at the address of the former.
                at = {"control": str(addresses[victim])}
                options = workers.options(victim).model_copy(update=at)
                launches[victim] = stack.enter_context(Launch([options], ready_s=600))
            killed.clear()
            cluster.recover()

        victims = {6: "b", 16: "d", 22: "c", 37: "b"}
        kills = {at: partial(kill, victim) for at, victim in victims.items()}
        patient = Deadly(cluster, recover, kills=kills)
        assert live(cluster, patient, 1, None) == quiet
        assert patient.losses >= 4 and not kills
