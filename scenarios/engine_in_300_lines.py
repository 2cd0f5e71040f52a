"""The engine of jdag in 300 lines: recording, FAST backward, sums in program order.

This is a simplified `jdag/engine`: it has no SMART mode, one output per call and one
pass per run. It computes directly, whereas the real engine returns effects to a driver.
Run it with `python scenarios/engine_in_300_lines.py`.

A program calls plain JAX functions on named workers. Each worker records its part of
the graph: calls, leaves, and one send for each value that moves to another worker. The
backward pass runs over all parts at once, by messages alone. Three ideas make it
correct, repeatable to the bit and free of timers:

1. **Dependencies.** Before a worker runs anything backward, it counts how many
   cotangents each of its values will receive. A value is ready when all are there.
2. **Program order.** The cotangents of a value are summed in program order (number of
   the call, then position of the argument), not in order of arrival.
3. **Credit** (Mattern, 1989). The pass has one unit of credit. Each of its messages
   carries a part, and a worker without further work returns its part to the owner.
   When the owner has the whole unit again, no message or job is pending: the pass has
   finished or is stuck.
"""

import functools
import itertools
import operator
import random
from collections import defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


# ------------------------------------------------------------------------- 1. Messages


class Ref(NamedTuple):
    """The name of a value: its worker, and its number in program order."""

    worker: str
    number: int


class Primal(NamedTuple):
    """A value sent by another worker, or a leaf sent by the program."""

    ref: Ref
    value: Array


class Call(NamedTuple):
    """Run `fn`. Arguments are refs or constants; `ref` is the name of the result."""

    ref: Ref
    fn: Callable[..., Array]
    args: tuple[Any, ...]


class Ship(NamedTuple):
    """Send a value to another worker; `number` is the first call that needs it."""

    ref: Ref
    to: str
    number: int


class Start(NamedTuple):
    """Begin the pass at this root."""

    root: Ref
    credit: Fraction


class Cotangent(NamedTuple):
    """The summed cotangent of a received value, for the worker that computed it."""

    ref: Ref
    sender: str
    value: Array
    credit: Fraction
    owed: int  # Change in the number of sends without a cotangent.


class Answer(NamedTuple):
    """Returns credit to the owner of the pass; `owed` is as in `Cotangent`."""

    credit: Fraction
    owed: int


Message = Primal | Call | Ship | Start | Cotangent | Answer
Effects = list[tuple[str, Message]]  # (receiver, message).
Addend = tuple[tuple[int, int], Array]  # A cotangent and its place in program order.


# --------------------------------------------------------------------------- 2. Worker


class Node(NamedTuple):
    """A completed call: its ref arguments and its vjp."""

    args: list[Ref]
    vjp: Callable[[Array], tuple[Array, ...]]


class Worker:
    """A state machine that turns messages into messages. It reads no clock."""

    def __init__(self, name: str, owner: str) -> None:
        self.name, self.owner = name, owner
        self.values: dict[Ref, Array] = {}
        self.nodes: dict[Ref, Node] = {}
        self.sends: dict[tuple[Ref, str], int] = {}
        self.waiting: list[Call | Ship] = []
        # The pass: counts of missing cotangents, received cotangents, and the results.
        self.missing: dict[Ref, int] | None = None
        self.addends: dict[Ref, list[Addend]] = defaultdict(list)
        self.owed: set[tuple[Ref, str]] = set()
        self.gradients: dict[Ref, Array] = {}

    def handle(self, message: Message) -> Effects:
        """Handle one message. Returns the resulting messages."""
        match message:
            case Primal(ref, value):
                self.values[ref] = value
                return self._forward()
            case Call() | Ship():
                self.waiting.append(message)
                return self._forward()
            case Start(root, credit):
                owed = self._count(root)
                seed = ((root.number, -1), jnp.ones_like(self.values[root]))
                return self._backward(root, seed, credit, owed)
            case Cotangent(ref, sender, value, credit, owed):
                owed += self._count(None) - 1
                self.owed.remove((ref, sender))
                addend = ((self.sends[ref, sender], -1), value)
                return self._backward(ref, addend, credit, owed)
            case Answer():
                raise AssertionError("answers go to the owner of the pass")

    # Forward: a call waits until all its arguments have arrived.

    def _forward(self) -> Effects:
        effects: Effects = []
        while ready := [item for item in self.waiting if self._has_arguments(item)]:
            item = ready[0]
            self.waiting = [each for each in self.waiting if each is not item]
            if isinstance(item, Call):
                self._record(item)
            else:
                self.sends[item.ref, item.to] = item.number
                effects.append((item.to, Primal(item.ref, self.values[item.ref])))
        return effects

    def _has_arguments(self, item: Call | Ship) -> bool:
        needed = item.args if isinstance(item, Call) else (item.ref,)
        return all(arg in self.values for arg in needed if isinstance(arg, Ref))

    def _record(self, call: Call) -> None:
        """Compute a call by `jax.vjp` with respect to its ref arguments."""
        refs = [arg for arg in call.args if isinstance(arg, Ref)]

        def function(*tracked: Array) -> Array:
            values = iter(tracked)
            args = [next(values) if isinstance(a, Ref) else a for a in call.args]
            return call.fn(*args)

        value, vjp = jax.vjp(function, *(self.values[ref] for ref in refs))
        self.values[call.ref] = value
        self.nodes[call.ref] = Node(refs, vjp)

    # Backward, idea 1: at the first message of the pass, count the cotangents.

    def _count(self, root: Ref | None) -> int:
        """Once, count each value's cotangents. Returns the number of owed sends."""
        if self.missing is not None:
            return 0
        self.missing = defaultdict(int)
        self.owed = set(
            self.sends
        )  # FAST: all sends. SMART first finds the sends that the root needs.
        reached = [ref for ref, _ in self.sends] + ([root] if root else [])
        for ref in reached:
            self.missing[ref] += 1
        seen = set()
        while reached:
            ref = reached.pop()
            if ref in self.nodes and ref not in seen:
                seen.add(ref)
                for arg in self.nodes[ref].args:
                    self.missing[arg] += 1
                    reached.append(arg)
        return len(self.sends)

    # Backward, ideas 2 and 3: run the vjps of ready values, and pass on the credit.

    def _backward(self, ref: Ref, new: Addend, credit: Fraction, owed: int) -> Effects:
        """Add one cotangent; run each vjp whose cotangents are then complete."""
        assert self.missing is not None
        out: list[tuple[Ref, Array]] = []
        arrived = deque([(ref, new)])
        while arrived:
            ref, new = arrived.popleft()
            self.addends[ref].append(new)
            self.missing[ref] -= 1
            if self.missing[ref] > 0:
                continue
            # All cotangents have arrived: sum them in program order.
            in_order = sorted(self.addends.pop(ref), key=lambda addend: addend[0])
            total = functools.reduce(operator.add, [value for _, value in in_order])
            if ref in self.nodes:
                args, vjp = self.nodes[ref]
                for i, (arg, value) in enumerate(zip(args, vjp(total), strict=True)):
                    arrived.append((arg, ((ref.number, i), value)))
            elif ref.worker == self.name:
                self.gradients[ref] = total
            else:
                out.append((ref, total))
        if not out:
            return [(self.owner, Answer(credit, owed))]
        share, changes = credit / len(out), itertools.chain([owed], itertools.repeat(0))
        return [
            (ref.worker, Cotangent(ref, self.name, total, share, next(changes)))
            for ref, total in out
        ]


# ------------------------------------------------------- 3. Network and program


class Cluster:
    """Workers with FIFO links. A random link delivers next; `seed` determines which."""

    def __init__(self, workers: list[str], seed: int = 0) -> None:
        self.workers = {name: Worker(name, "main") for name in workers}
        self.links: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.rng = random.Random(seed)
        self.numbers = itertools.count(1)
        self.shipped: set[tuple[Ref, str]] = set()
        self.credit, self.owed = Fraction(0), 0

    def put(self, worker: str, value: Any) -> Ref:
        """Create a leaf on a worker: a value that receives a gradient."""
        ref = Ref(worker, next(self.numbers))
        self.links["main", worker].append(Primal(ref, jnp.asarray(value)))
        return ref

    def call(self, worker: str, fn: Callable[..., Array], *args: Any) -> Ref:
        """Call a function on a worker. Arguments on other workers are sent to it."""
        ref = Ref(worker, next(self.numbers))
        for arg in args:
            is_far = isinstance(arg, Ref) and arg.worker != worker
            if is_far and (arg, worker) not in self.shipped:
                self.shipped.add((arg, worker))
                self.links["main", arg.worker].append(Ship(arg, worker, ref.number))
        self.links["main", worker].append(Call(ref, fn, args))
        return ref

    def backward(self, root: Ref) -> dict[Ref, Array]:
        """Return the gradients of a scalar with respect to the leaves it depends on."""
        self._deliver_all()  # Run all calls before the pass.
        self.links["main", root.worker].append(Start(root, Fraction(1)))
        self._deliver_all()
        assert self.credit == 1, f"only {self.credit} of the credit has returned"
        if self.owed:
            owed = sorted(send for w in self.workers.values() for send in w.owed)
            sends = [f"value {ref.number} ({ref.worker} -> {to})" for ref, to in owed]
            raise RuntimeError(f"stuck: no cotangent will come for {', '.join(sends)}")
        return {k: v for w in self.workers.values() for k, v in w.gradients.items()}

    def _deliver_all(self) -> None:
        while busy := [link for link, queue in self.links.items() if queue]:
            source, destination = self.rng.choice(busy)
            message = self.links[source, destination].popleft()
            if isinstance(message, Answer):
                self.credit += message.credit
                self.owed += message.owed
                continue
            for receiver, effect in self.workers[destination].handle(message):
                self.links[destination, receiver].append(effect)


def main() -> None:
    """Differentiate a program over three workers, in five orders of delivery."""
    for seed in range(5):
        cluster = Cluster(["a", "b", "c"], seed)
        w = cluster.put("a", jnp.linspace(-1.0, 1.0, 9).reshape(3, 3))
        h = cluster.call("a", jnp.tanh, w)
        parts = [cluster.call(to, jnp.linalg.norm, h) for to in ("b", "c", "a")]
        loss = cluster.call("b", lambda *parts: sum(parts), *parts)
        gradient = cluster.backward(loss)[w]
        print(f"seed {seed}: {gradient[0]}, bits {gradient.tobytes().hex()[:16]}...")


if __name__ == "__main__":
    main()
