"""Data parallelism: copies of parameters, chunks of rows, and sums of gradients.

In a single process, call these functions outside of `jax.jit`, since they move arrays.
The functions passed to them are jitted. Functions that run on a worker may call them.

With several processes, after `jax.distributed.initialize(address, num_processes,
process_id)`, `data_parallel` also accepts `jax.devices()`. Each process passes its own
rows (their number may differ) and the same parameters, and gets the outputs and
gradients of its rows on its own devices.

Parameter gradients are summed over all replicas: first per process in replica order,
then by one collective over the processes (gloo on CPU, NCCL on GPU), whose order the
library chooses. All processes get the same bits. With gloo on one host, four processes
got the same bits in every run; NCCL was not measured. Sums differ from those of one
device by a few roundings: 3e-6 of the largest element in float32, 3e-14 in float64.

With `axis_name`, a function reduces over the replicas of all processes. Before each
collective the processes compare function, shapes and options. On a mismatch, or if a
process has ended, all processes raise an error that names it. A call waits for all
processes for at most `deadline_s`, and so does the exit of a program that made a call.
"""

from jdag.parallel.apply import parallel_apply
from jdag.parallel.data import data_parallel, row_mean
from jdag.parallel.movement import gather, reduce_add, replicate, scatter

__all__ = [
    "data_parallel",
    "gather",
    "parallel_apply",
    "reduce_add",
    "replicate",
    "row_mean",
    "scatter",
]
