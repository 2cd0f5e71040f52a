"""Objects that tests host on workers, and programs that are handed them."""

import os
import signal

import numpy as np

import jdag


class Counter:
    """A total that changes by steps which another call could fall between."""

    limit = 100

    def __init__(self, total=0, *, says=""):
        self.total = total
        self.says = says

    def add(self, by=1):
        self.total += by
        return self.total

    def add_slowly(self, leaf):
        before = self.total
        self.total = before + int(leaf.fetch())  # Others run meanwhile.
        return self.total

    def text(self):
        return {"says": self.says, "totals": [self.total, 1.5], "none": None}

    def raises(self):
        self.total += 1
        raise ValueError(f"no more than {self.total}")

    def itself(self):
        return {"me": [self]}

    def odd(self):
        return {"is": (1, object())}

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kind_of(self, value):
        return type(value).__name__

    def handle(self, other):
        return other

    def __call__(self, *args, **kwargs):
        return [self.total, args, kwargs]

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return index * 2

    def __next__(self):
        self.total += 1
        return self.total

    def __repr__(self):
        return f"Counter({self.total})"


class Env:
    def __init__(self, state):
        self.state = np.array(state)

    def step(self, action):
        self.state += action
        return self.state, {"reward": float(self.state.sum())}

    def keep(self, array):
        self.state = array
        return array.flags.writeable


class Relay:
    def __init__(self, other=None):
        self.other = other

    def link(self, other):
        self.other = other

    def ask(self, method, *args):
        return self.other.call(method, *args)

    def hold(self):
        return type(self.other).__name__


def counted(total):
    return Counter(total)


def failing():
    raise LookupError("no such data")


@jdag.program
def bump(ctx, counter, leaf):
    before = counter.total
    counter.total = before + int(leaf.fetch())
    return ctx.here, type(counter).__name__


@jdag.program
def calls(ctx, env, count):
    tasks = [env.start("add") for _ in range(count)]
    return type(env).__name__, jdag.wait(tasks)


@jdag.program
def makes_unread(ctx, env):
    env.start("raises")


@jdag.program
def handed(ctx, env):
    return env


def trains(env, leaf, cluster):
    found = [env.call("add_slowly", leaf) for _ in range(5)]
    assert found == sorted(found)
    return found


def hosts(cluster):
    return cluster.host("d", Counter, 40)
