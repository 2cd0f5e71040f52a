"""What PyTorch's distributed autograd does and fails at: one suite for every driver.

Its behaviour was read in its documents and tests and seen on torch 2.13.0; the numbers
are exact.

test_ids, test_callers
- 200 contexts have 200 ids; `id >> 48` is the worker's number.
- The counter ends at 2^48 - 1, and then refuses.
- After a context ends, every use of its id fails on every worker that took part.
- Each of 3 trainers in its own open context on one parameter server: none mixed.
- 60 contexts from concurrent callers on one worker: 126, 13, 27.
- Several programs run at once, with the oracle's gradients; errors in program order.

test_forward: what forward records
- add on a remote worker, reply moved back: 1 send and 1 recv at each end.
- Both inputs of its add come from the same recv.
- Three hops: ends have 1 and 1, middles 2 and 2.
- A leaf on the callee's own worker: one gradient there, none at the caller.
- The remote function sees which arguments are tracked.
- Untracked arguments get no entry in the gradients.
- A function multiplies if t2 is tracked and subtracts otherwise.

test_backward, test_hooks
- Local only, no remote call at all: all leaves have gradients.
- Several roots are the backward of their sum: 3.5 and 1.
- Round trips over 3 workers: 4131; 864, 1728, 54.
- sum(t1 t2 t3 t4 t5): 1594323; 885735; 1240029.
- split into 5 parts, product of parts 0, 2, 4: 4 there, 0 elsewhere; 16.
- Unused arguments get an explicit zero; unused outputs are zeros to the vjp.
- A second pass in one context adds. Without `retain_graph` it is an error that says so.
- A function on a leaf's cotangent may replace it.
- Functions after accumulation run once each.

test_replicas, test_collectives
- DataParallel's ReduceAdd: gradients of replicas add up on the original's owner.
- DistributedDataParallel's all-reduce: all replicas get one sum.
- torch.distributed.nn's gather, reduce-scatter and all-to-all have gradients.
- DDP's programs, one on each worker, meet in collectives. A member that is absent,
  differs, dies or waits for something else is named in the error of each member.

test_errors
- Six wrong roots are six different messages.
- An error in the backward of the second hop has the path of workers.
- 50 failing passes and then a good one; 0 live passes after each.
- A worker that dies: an error at the caller within the deadline.

test_optimizer, test_trainers
- One step on each owner, in parallel; errors are named by owner.
- A parameter without a gradient does not move: 0.8 and 0.9.
- SGD 0.05 on two owners: gradients 9, weights 0.55.
- Training that is saved and resumed goes on with the same bits.

test_plans, test_python: jdag's own
- A step that is recorded is what its program does, and leaves nothing else.
- Functions run as Python on real arrays; buffers are state without gradients.

test_failing: where PyTorch fails, and jdag does not
- Gradients differ from run to run: 1, 3, 10, 97, 100 patterns for K = 2 to 24.
- It hangs for ever on a dropped reply, a stopped gradient, an integer, a log; it fails
  without a name on a nested dropped reply.
- It fails on two losses of one context, one at a time.
- A failure between two visits of a worker leaves it a live pass for ever. Other workers
  are not told of a failure. Contexts whose owner died stay for ever.
- Roots are scalar and local. Functions and values travel as pickle.
"""
