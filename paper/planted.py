"""Bugs to be planted in the engine, each of which only some orders of events show."""

from typing import NamedTuple


class Bug(NamedTuple):
    """What is promised, the text that is replaced, and the program that may show it."""

    fact: str
    file: str
    before: str
    after: str
    program: str


BUGS = (
    Bug(
        "addends are summed in the order of the program",
        "worker_pass.py",
        "for _, _, key in sorted(addends)",
        "for _, _, key in addends",
        "terms",
    ),
    Bug(
        "addends are ordered by path before position",
        "worker_pass.py",
        "for _, _, key in sorted(addends)",
        "for _, _, key in sorted(addends, key=lambda addend: addend[1])",
        "terms",
    ),
    Bug(
        "a vjp waits for its forward",
        "backward.py",
        "        elif not node.done:",
        "        elif node.done is None:",
        "terms",
    ),
    Bug(
        "a worker that waits for a forward is not done with a pass",
        "backward.py",
        "            live.busy += 1\n        elif node.failure",
        "            live.busy += 0\n        elif node.failure",
        "terms",
    ),
    Bug(
        "a worker that waited for a forward is done with it",
        "backward.py",
        "        live.busy -= 1\n        live.ready.append(node)",
        "        live.busy -= 0\n        live.ready.append(node)",
        "terms",
    ),
    Bug(
        "a forward wakes the pass that waits for it",
        "forward.py",
        "        if node.waited:",
        "        if node.waited is None:",
        "terms",
    ),
    Bug(
        "credits of different denominators are added exactly",
        "credit.py",
        "units += units_of(b) << halvings - b.halvings",
        "units += units_of(b)",
        "hooked",
    ),
    Bug(
        "a pass begins when all calls are acknowledged",
        "passes.py",
        "self._frames.when_acknowledged(top, begin)",
        "begin()",
        "terms",
    ),
    Bug(
        "FAST announces the roots of several workers before the pass begins",
        "passes.py",
        "alone = len(by_worker) == 1 and mode is Mode.FAST",
        "alone = mode is Mode.FAST",
        "fast",
    ),
    Bug(
        "a pass is over when all have answered",
        "passes.py",
        "            if not fragment.awaited:\n                self.conclude",
        "            if len(fragment.awaited) < 2:\n                self.conclude",
        "terms",
    ),
    Bug(
        "a program is called when what it is handed is known everywhere",
        "program_frames.py",
        "self.when_acknowledged(frame, partial(self._state.send, event.worker, run))",
        "self._state.send(event.worker, run)",
        "nested",
    ),
    Bug(
        "a program returns when its calls are acknowledged",
        "program_frames.py",
        "self.when_acknowledged(frame, callback, idle=True)",
        "callback()",
        "nested",
    ),
    Bug(
        "the request of a transfer is acknowledged before a pass begins",
        "program_frames.py",
        "expect_handling(to, path, frame, waits)",
        (
            "expect_handling(\n"
            "                to, path, frame if waits is None else "
            "FrameRecord((), None)\n            )"
        ),
        "terms",
    ),
    Bug(
        "an acknowledgement is of one worker",
        "program_frames.py",
        "            self._state.handled(sent.popleft())\n",
        (
            "            path = sent[0][1]\n"
            "            self._state.handled(sent.popleft())\n"
            "            for others in self._state.unhandled.values():\n"
            "                for place, each in enumerate(others):\n"
            "                    if each[0] is not None and each[1] == path:\n"
            "                        self._state.handled(each)\n"
            "                        other = FrameRecord(path, None)\n"
            "                        others[place] = other, path, None\n"
        ),
        "terms",
    ),
    Bug(
        "one acknowledgement is not all of them",
        "state.py",
        "            frame.unhandled -= 1",
        "            frame.unhandled = 0",
        "terms",
    ),
    Bug(
        "of many contributions eight neighbours are summed in program order",
        "addends.py",
        "for _, key in sorted(group.items())",
        "for _, key in group.items()",
        "many",
    ),
    Bug(
        "a hop that comes before its step is kept",
        "steps.py",
        "        if values:\n            self.store(",
        "        if values and (step.begun or frame.begins):\n            self.store(",
        "planned",
    ),
    Bug(
        "a step waits for versions that are being made",
        "steps.py",
        "self._state.when_settled(versions, self._begin, step, versions)",
        "self._begin(step, versions)",
        "stepped",
    ),
    Bug(
        "an ending pass does not wait for a lost worker",
        "context_teardown.py",
        "if was_awaited and not fragment.awaited:",
        "if was_awaited and fragment.waiter < 0:",
        "crash",
    ),
    Bug(
        "what waits for several values waits for all",
        "state.py",
        "[value for value in values if not value.settled]",
        "[value for value in values[:1] if not value.settled]",
        "diamond",
    ),
    Bug(
        "a node that waited for its forward runs then",
        "backward.py",
        "        live.busy -= 1\n        live.ready.append(node)",
        "        live.busy -= 1",
        "terms",
    ),
    Bug(
        "a node says that a pass waits for it",
        "backward.py",
        "            node.waited = True\n",
        "",
        "terms",
    ),
    Bug(
        "leaves that were put are acknowledged before programs are called",
        "program_frames.py",
        "busy = frame.unhandled or self._state.assignments",
        "busy = frame.unhandled and self._state.assignments",
        "nested",
    ),
    Bug(
        "news that came before a program waits for them is reported",
        "program_frames.py",
        "event.timeout_ns))\n        self._report(frame)",
        "event.timeout_ns))",
        "several",
    ),
    Bug(
        "a pass waits for calls, and not for assignments alone",
        "program_frames.py",
        "busy = frame.unhandled or self._state.assignments",
        "busy = self._state.assignments",
        "terms",
    ),
    Bug(
        "addends are sorted also if the first one came first",
        "worker_pass.py",
        "for _, _, key in sorted(addends)",
        (
            "for _, _, key in (addends if addends[0] == min(addends) else "
            "sorted(addends))"
        ),
        "between",
    ),
    Bug(
        "addends are sorted also if the first came first and the last came last",
        "worker_pass.py",
        "for _, _, key in sorted(addends)",
        (
            "for _, _, key in (addends if (addends[0], addends[-1]) == "
            "(min(addends), max(addends)) else sorted(addends))"
        ),
        "zipped",
    ),
)
