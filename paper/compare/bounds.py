"""What bounds each row of the comparison on our side, as profiles have it.

How it was found: time stamps around each step of one operation on both sides, while
both spin so that no process of another has their cores; cProfile of the caller; and
`paper.compare.costs`, which anybody can run again.
"""

_CALL = (
    "Python, one step after the other: of 410 us the caller takes 105 until the bytes "
    "leave (47 in ctx.call before the engine is told, 8 in the engine, 28 for the "
    "message's bytes, 14 to flush), the worker 209 (54 for the call, 18 to "
    "flush its acknowledgement, 46 for the job, of which XLA has 10, 61 for the read "
    "and its answer), the caller 90 from the answer to the array. The caller makes "
    "1,000 calls of functions; waiting for wake-ups is 10 us in all."
)
_HOP = (
    "Python: a round trip is 8 messages and, at the caller, 1,300 calls of functions "
    "forward and 450 backward; caller and worker run three quarters of the time each. "
    "By itself the engine takes 48 us of it at the caller and 28 at the worker, "
    "ctx.call and ctx.move 18 each; what is left is bytes, link, sockets and jobs."
)
_FAN_OUT = (
    "Python at the caller: 670 calls of functions and 200 us for each call of the "
    "fan-out, forward and backward; of forward a third is ctx.call before the engine "
    "is told, a tenth the engine, a quarter a message's bytes, a tenth flushing, since "
    "each call leaves by itself."
)
_PASS = (
    "Two exchanges in a row where the peer has one: cotangents, then End, which is "
    "acknowledged so that nothing is left of a pass. 1,280 calls of functions at the "
    "caller, 5 jobs of 10 to 35 us each."
)
_SMALL = (
    f"{_CALL} Between 64 KiB and 1 MiB one copy more at either end, or a chunk each "
    "256 KiB."
)
_LARGE = (
    "Copies: into shared memory and out of it where there is a segment, else socket."
)
_STEP = (
    "60 messages and 14,600 calls of functions at the caller, 9 ms of its time, most "
    "of it while workers compute; from 1,024 wide on XLA's products and sums are more "
    "than nine tenths of what the workers run."
)
_MEMORY = (
    "JAX's own 190 MB before the first array (import 150, first compile 47), then "
    "weights, gradients, and buffers that are kept to be received into again."
)

BOUNDS = {
    "add 3x3, reply fetched": _CALL,
    "identity 64 KiB": _SMALL,
    "identity 1 MiB": _SMALL,
    "identity 16 MiB": _LARGE,
    "identity 64 MiB": _LARGE,
    "chain of 1, forward": _HOP,
    "chain of 1, backward": _PASS,
    "chain of 10, forward": _HOP,
    "chain of 10, backward": _HOP,
    "chain of 100, forward": _HOP,
    "chain of 100, backward": _HOP,
    "fan-out of 64, forward": _FAN_OUT,
    "fan-out of 64, backward": _FAN_OUT,
    "1,000 retained passes": _PASS,
    "step of MLP 256 wide": _STEP,
    "step of MLP 1024 wide": _STEP,
    "step of MLP 4096 wide": _STEP,
    "peak memory of a worker": _MEMORY,
}
