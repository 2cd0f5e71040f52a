"""How each pass of a plan must end, found from the plan alone.

It knows nothing of the engine: it follows the plan's steps, notes which call sends
what where, and works out by the rule of a mode, over the whole graph at once, what a
pass waits for.

FAST's rule. A worker is reached if it has a root or is sent a cotangent. On a reached
worker everything counts that its roots, or its sends that no earlier pass has spent,
are computed from there. A recv that counts sends its cotangents once everything that
uses it and counts has had its own. A send that counts and never gets any is owed.

SMART's rule. What the roots were computed from counts, through each slot that something
of that used; nothing can be owed.

In both, a call or a send that counts and was spent before fails the pass; what only
hands cotangents on, a recv, is never spent, and nor is what SMART sends through.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from jdag.engine.protocol import Owed
from tests.random_functions import INEXACT, Hook
from tests.random_programs import (
    Branch,
    Call,
    Constant,
    Fetch,
    Invoke,
    Move,
    Pass,
    Plan,
    Raise,
    Step,
    Use,
)

Path = tuple[int, ...]
MOVED = "jdag.engine.functions:transferred"


@dataclass(eq=False)
class Vertex:
    """A recorded call, one end of a transfer, or a leaf; `sources` are those before."""

    worker: str
    sources: "list[Vertex]" = field(default_factory=list)
    spent: bool = False


@dataclass(eq=False)
class Leaf(Vertex):
    """A leaf, the so-manieth of its plan."""

    number: int = -1


@dataclass(eq=False)
class Send(Vertex):
    """The end of a transfer that cotangents come back to."""

    owed: Owed | None = None


@dataclass(eq=False)
class Recv(Vertex):
    """The other end."""

    send: Send | None = None


@dataclass(eq=False)
class Slot(Vertex):
    """One value of a recv, and what it was computed from on the other side."""

    beyond: Vertex | None = None


@dataclass(eq=False)
class Value:
    """An array on a worker; who made it, if anything flows back there."""

    worker: str
    maker: Vertex | None


@dataclass(frozen=True)
class Ref:
    """A value, tracked or not."""

    value: Value
    tracked: bool


@dataclass
class Ended:
    """How a pass ends ("finished", "stuck", "spent"), what is owed, what is reached."""

    outcome: str
    owed: tuple[Owed, ...] = ()
    leaves: tuple[int, ...] = ()


@dataclass
class Frame:
    """One run of a program: its refs, its calls so far, what it has sent already."""

    prefix: Path
    refs: dict[int, Ref]
    calls: Iterator[int] = field(default_factory=lambda: count(1))
    sent: dict[tuple[Value, bool, str], Slot] = field(default_factory=dict)

    def taken(self, argument: Use | Constant) -> Ref | None:
        if isinstance(argument, Constant):
            return None
        ref = self.refs[argument.variable]
        return Ref(ref.value, ref.tracked and not argument.stopped)


class Reachability:
    """Follows a plan on the ways that it went; `ended` has its passes."""

    def __init__(
        self, plan: Plan, sites: dict[int, str], decisions: Sequence[bool], mode: str
    ) -> None:
        self._rule: type[Fast | Smart] = Smart if mode == "smart" else Fast
        self.ended: list[Ended] = []
        self._sites = sites
        self._decisions = iter(decisions)
        self._vertices: list[Vertex] = []
        top = Frame((), {})
        for number, leaf in enumerate(plan.leaves):
            maker = Leaf(leaf.worker, number=number) if leaf.inexact else None
            value = Value(leaf.worker, maker)
            top.refs[leaf.variable] = Ref(value, leaf.inexact)
        self._follow(top, plan.steps)

    # ---------------------------------------------------------------------- forward

    def _follow(self, frame: Frame, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Call():
                    self._call(frame, step)
                case Move():
                    self._move(frame, step)
                case Branch():
                    above = next(self._decisions)
                    self._follow(frame, step.above if above else step.below)
                case Invoke():
                    self._invoke(frame, step)
                case Pass():
                    self._pass(frame, step)
                case Hook():
                    next(frame.calls)  # It counts as one.
                case Fetch():
                    pass
                case Raise():
                    raise AssertionError(step)

    def _call(self, frame: Frame, step: Call) -> None:
        taken = [frame.taken(argument) for argument in step.arguments]
        inexact = INEXACT.get(step.function, (True,) * len(step.outputs))
        name = f"tests.random_functions:{step.function}"
        refs = self._record(frame, step.id, step.worker, name, taken, inexact)
        frame.refs.update(zip(step.outputs, refs, strict=True))

    def _move(self, frame: Frame, step: Move) -> None:
        """What is tracked goes by one call, the rest by another."""
        pairs = [
            (output, ref)
            for output, argument in zip(step.outputs, step.arguments, strict=True)
            if (ref := frame.taken(argument)) is not None
        ]
        for tracked in (True, False):
            mine = [(output, ref) for output, ref in pairs if ref.tracked is tracked]
            if mine:
                outputs, taken = zip(*mine, strict=True)
                inexact = (tracked,) * len(mine)
                refs = self._record(frame, step.id, step.worker, MOVED, taken, inexact)
                frame.refs.update(zip(outputs, refs, strict=True))

    def _record(
        self,
        frame: Frame,
        id: int,
        worker: str,
        name: str,
        taken: Sequence[Ref | None],
        inexact: Sequence[bool],
    ) -> list[Ref]:
        path = (*frame.prefix, next(frame.calls))
        sources: list[Vertex] = []
        news: dict[str, tuple[Send, Recv]] = {}
        for ref in taken:
            if ref is None:
                continue
            source: Vertex | None
            if ref.value.worker == worker:
                source = ref.value.maker
            else:
                what = (ref.value, ref.tracked, worker)
                if what not in frame.sent:
                    owner = ref.value.worker
                    owed = Owed(path, owner, worker, name, self._sites[id])
                    send = Send(owner, owed=owed)
                    ends = news.setdefault(owner, (send, Recv(worker, send=send)))
                    frame.sent[what] = Slot(worker, [ends[1]], beyond=ref.value.maker)
                    if ref.tracked and ref.value.maker is not None:
                        ends[0].sources.append(ref.value.maker)
                source = frame.sent[what]
            if ref.tracked and source is not None:
                sources.append(source)
        for send, recv in news.values():
            if send.sources:  # Else nothing flows back through it.
                self._vertices += [send, recv]
        recorded = bool(sources) and any(inexact)
        node = Vertex(worker, sources)
        if recorded:
            self._vertices.append(node)
        return [
            Ref(Value(worker, node if recorded and each else None), recorded and each)
            for each in inexact
        ]

    def _invoke(self, frame: Frame, step: Invoke) -> None:
        path = (*frame.prefix, next(frame.calls))
        inner = Frame(path, {})
        for parameter, argument in zip(
            step.body.parameters, step.arguments, strict=True
        ):
            ref = frame.taken(argument)
            assert ref is not None, argument
            inner.refs[parameter] = ref
        self._follow(inner, step.body.steps)
        for output, returned in zip(step.outputs, step.body.returns, strict=True):
            frame.refs[output] = inner.refs[returned]

    # --------------------------------------------------------------------- backward

    def _pass(self, frame: Frame, step: Pass) -> None:
        if not step.retain:  # Transfers get spent; a leaf can be sent again.
            frame.sent = {
                what: recv
                for what, recv in frame.sent.items()
                if not (what[1] and isinstance(what[0].maker, Leaf))
            }
        rule = self._rule(self._vertices)
        roots = [frame.refs[root].value.maker for root in step.roots]
        ended = rule.run([root for root in roots if root is not None])
        self.ended.append(ended)
        if not step.retain:
            finished = ended.outcome == "finished"
            for vertex in rule.counted if finished else self._vertices:
                vertex.spent = type(vertex) in (Vertex, Send)


class Smart:
    """One SMART pass."""

    def __init__(self, vertices: Sequence[Vertex]) -> None:
        self.counted: dict[Vertex, None] = {}

    def run(self, roots: Sequence[Vertex]) -> Ended:
        """Follow what the roots were computed from, through slots that brought it."""
        left = list(roots)
        while left:
            vertex = left.pop()
            if vertex in self.counted:
                continue
            self.counted[vertex] = None
            if isinstance(vertex, Slot):
                assert vertex.beyond is not None, vertex
                left.append(vertex.beyond)
            else:
                left += vertex.sources
        if any(vertex.spent for vertex in self.counted):
            return Ended("spent")
        return Ended("finished", (), leaves_of(self.counted))


def leaves_of(counted: Iterable[Vertex]) -> tuple[int, ...]:
    """The numbers of the leaves among these."""
    return tuple(sorted(v.number for v in counted if isinstance(v, Leaf)))


class Fast:
    """One FAST pass."""

    def __init__(self, vertices: Sequence[Vertex]) -> None:
        self._sends = [v for v in vertices if isinstance(v, Send)]
        self._spent = [v for v in vertices if v.spent]
        self._users: dict[Vertex, list[Vertex]] = {}
        self._reached: dict[str, None] = {}
        self._sure: dict[Vertex, None] = {}
        self.counted: dict[Vertex, None] = {}

    def run(self, roots: Sequence[Vertex]) -> Ended:
        """Reach workers until no recv there is left that can send its cotangents."""
        wanted = dict.fromkeys(root.worker for root in roots)
        while len(wanted) > len(self._reached):
            for worker in wanted:
                if worker not in self._reached:
                    self._reach(worker, roots)
            if any(vertex in self.counted for vertex in self._spent):
                return Ended("spent")
            self._sure.clear()
            for recv in self._complete():
                assert recv.send is not None, recv
                if recv.send.spent:
                    return Ended("spent")
                wanted[recv.send.worker] = None
        answered = {recv.send: None for recv in self._complete()}
        owed = [s for s in self.counted if isinstance(s, Send) and s not in answered]
        if owed:
            return Ended("stuck", tuple(sorted(s.owed for s in owed if s.owed)))
        return Ended("finished", (), leaves_of(self.counted))

    def _reach(self, worker: str, roots: Sequence[Vertex]) -> None:
        self._reached[worker] = None
        sends = [s for s in self._sends if s.worker == worker and not s.spent]
        left: list[Vertex] = [*sends, *(r for r in roots if r.worker == worker)]
        while left:
            vertex = left.pop()
            if vertex in self.counted:
                continue
            self.counted[vertex] = None
            for source in vertex.sources:
                self._users.setdefault(source, []).append(vertex)
                left.append(source)

    def _complete(self) -> list[Recv]:
        """The recvs that count and have all their cotangents."""
        return [v for v in self.counted if isinstance(v, Recv) and self._full(v)]

    def _full(self, vertex: Vertex) -> bool:
        """Whether all who use a vertex, and count, give it its cotangents."""
        if vertex in self._sure:
            return True
        if isinstance(vertex, Send):
            # Its cotangents come from its recv, if that counts at all.
            recv = next((v for v in self.counted if _receives(v, vertex)), None)
            if recv is None or not self._full(recv):
                return False
        elif not all(map(self._full, self._users.get(vertex, ()))):
            return False
        self._sure[vertex] = None
        return True


def _receives(vertex: Vertex, send: Send) -> bool:
    return isinstance(vertex, Recv) and vertex.send is send
