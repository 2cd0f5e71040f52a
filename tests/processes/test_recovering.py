"""Recovery on processes: the same bits, and processes that are started anew."""

import os
import signal
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

import jdag
from jdag.processes.launch.launch import Launch
from tests.tools.recovery_cases import WORKERS, Patient, train
from tests.tools.rpc_workers import Workers


@pytest.mark.second
def test_a_training_whose_workers_are_killed_ends_with_the_bits_of_a_quiet_run():
    with jdag.simulate(WORKERS, seed=0, recover=True) as cluster:
        quiet = train(cluster, Patient(cluster.recover))
    victims = {0: "b", 1: "d", 2: "c", 3: "b"}  # Steps 1 and 3 are of a plan.
    with jdag.launch(
        WORKERS, device="cpu", recover=True, allow=["tests.tools.recovery_cases"]
    ) as cluster:

        def kill(step: int) -> None:
            if step in victims:
                victim = victims.pop(step)
                os.kill(cluster.driver.launch.pids[victim], signal.SIGKILL)

        patient = Patient(cluster.recover)
        assert train(cluster, patient, begins=kill) == quiet
        assert 4 <= patient.losses <= 8 and not victims
        assert len(cluster.driver.launch.alive) == 3


@pytest.mark.second
def test_a_training_goes_on_when_workers_of_a_file_join_again():
    with jdag.simulate(WORKERS, seed=0, recover=True) as cluster:
        quiet = train(cluster, Patient(cluster.recover))
    victims = {1: "b", 2: "d", 3: "b"}
    workers = Workers(WORKERS)
    with ExitStack() as stack:
        stack.callback(workers.close)
        launches = dict.fromkeys(WORKERS[1:], workers.launch)
        addresses = dict(workers.launch.addresses)
        killed = list[str]()
        cluster = jdag.connect(workers.path, name="a", recover=True)
        stack.enter_context(cluster)

        def kill(step: int) -> None:
            if step in victims:
                victim = victims.pop(step)
                os.kill(launches[victim].pids[victim], signal.SIGKILL)
                killed.append(victim)

        def recover() -> None:
            for victim in killed:  # Another process, at the address of the former.
                at = {"control": str(addresses[victim])}
                options = replace(workers.options(victim), **at)
                launches[victim] = stack.enter_context(Launch([options], ready_s=600))
            killed.clear()
            cluster.recover()

        patient = Patient(recover)
        assert train(cluster, patient, begins=kill) == quiet
        assert patient.losses >= 3 and not victims
