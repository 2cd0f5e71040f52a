"""What goes on beside a program: others, in contexts of their own, on the same workers.

They begin and end in the middle of whatever it does, and use leaves that are replaced
in between, so that all that is in order across contexts is put to the test.
"""

import random

from jdag.engine.protocol import Argument
from tests.tools.engine_cases import assign_newest, finished, newest
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_programs import Run, drawn
from tests.tools.engine_values import ADD, DOUBLE, TRIPLE

DEPTH_MAX = 2


def now_and_then(net: Net, rng: random.Random, chance: float, depth: int = 0) -> None:
    def before(net: Net) -> None:
        if rng.random() >= chance:
            return
        net.before_step = None
        if depth + 1 < DEPTH_MAX:
            now_and_then(net, rng, chance, depth + 1)
        if rng.random() < 0.5:
            train(net, rng)
        else:
            program(net, rng)
        net.before_step = before

    net.before_step = before


def program(net: Net, rng: random.Random) -> None:
    workers = rng.sample(net.workers, rng.randint(1, len(net.workers)))
    run = Run(drawn(rng.random(), tuple(workers)), net)
    run.all()
    assert run.scope.leave() == ()


def train(net: Net, rng: random.Random) -> None:
    """Leaves are replaced between contexts: each reads the version that it has to.

    What one context read stays so while it is open, whatever becomes of the leaf.
    """
    home, there, other = (rng.choice(net.workers) for _ in range(3))
    leaf = net.put(there, rng.randint(-2, 3), home)
    fixed = net.put(there, 1, home)
    value = net.fetch(home, leaf)[0][0]
    open_ones: list[tuple[Scope, Argument, int]] = []
    for _ in range(rng.randint(1, 4)):
        scope = net.open(home)
        (out,) = scope.call(other, TRIPLE, newest(leaf))
        open_ones.append((scope, out, 3 * value))
        if rng.random() < 0.5:
            net.some()
        if rng.random() < 0.5:
            finished(scope, out)
            assert scope.gradients(leaf) == [3]
        if rng.random() < 0.5:
            assign_newest(net, home, leaf, DOUBLE, newest(leaf))
            value *= 2
        else:
            assign_newest(net, home, leaf, ADD, newest(leaf), fixed)
            value += 1
        assert net.fetch(home, newest(leaf))[0][0] == value
        if rng.random() < 0.5:
            close(net, *open_ones.pop(rng.randrange(len(open_ones))))
    last = net.asked(home, newest(leaf))
    net.drop(home, leaf, fixed, net.put(other, 1, home))
    assert net.until(home, last)[0][0] == value
    while open_ones:
        close(net, *open_ones.pop())


def close(net: Net, scope: Scope, out: Argument, wanted: int) -> None:
    assert net.fetch(scope.worker, out)[0][0] == wanted
    assert scope.leave() == ()
