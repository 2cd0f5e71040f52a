"""A recurrent net whose embedding and decoder are remote, as in PyTorch's rpc/rnn.

The parameter server keeps the table of embeddings and the decoder, the trainer the
recurrent cell between them. Sequences count in steps of 1 to 4, modulo the number of
tokens, and are read in windows, one context each. The hidden state is carried over from
window to window, gradients are not (truncated backpropagation through time). Without
that state, nothing tells the step of a sequence where a window begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jdag
from jdag.scenario import Figures, Run, Training

FIGURES: Mapping[str, str] = {
    "accuracy": "next tokens that are right, over the last 10 windows",
    "first_loss": "mean cross-entropy of the first window, nats",
    "final_loss": "mean cross-entropy of the last window, nats",
}
TOKENS, STEPS = 12, 4


def embedded(table: Array, tokens: Array) -> Array:
    """The embeddings (width) of tokens (sequences, length)."""
    return table[tokens]


def recurrent(cell: Mapping[str, Array], hidden: Array, inputs: Array) -> Any:
    """A gated recurrent unit: (its outputs, one for each input; its hidden state)."""

    def step(hidden: Array, x: Array) -> tuple[Array, Array]:
        gates = jax.nn.sigmoid(x @ cell["x_gates"] + hidden @ cell["h_gates"])
        reset, update = jnp.split(gates, 2, axis=-1)
        new = jnp.tanh(x @ cell["x_new"] + (reset * hidden) @ cell["h_new"])
        hidden = update * hidden + (1 - update) * new
        return hidden, hidden

    hidden, outputs = jax.lax.scan(step, hidden, jnp.swapaxes(inputs, 0, 1))
    return jnp.swapaxes(outputs, 0, 1), hidden


def loss(decoder: Array, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """(The mean cross-entropy of the next tokens, how many of them are right)."""
    scores = outputs @ decoder
    each = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return jnp.mean(each), jnp.mean(jnp.argmax(scores, axis=-1) == targets)


def made(width: int) -> dict[str, Any]:
    """The parameters."""
    draw = np.random.default_rng(0).standard_normal
    gates, new = (width, 2 * width), (width, width)
    shapes = {"x_gates": gates, "h_gates": gates, "x_new": new, "h_new": new}
    return {
        "table": jnp.asarray(draw((TOKENS, width))),
        "cell": {name: jnp.asarray(0.2 * draw(of)) for name, of in shapes.items()},
        "decoder": jnp.asarray(0.2 * draw((width, TOKENS))),
    }


@jax.jit
@jax.grad
def plain(params: Any, hidden: Array, tokens: Array) -> Array:
    """The whole of a window, on one machine: its gradients are the truth."""
    inputs = embedded(params["table"], tokens[:, :-1])
    outputs, _ = recurrent(params["cell"], hidden, inputs)
    return loss(params["decoder"], outputs, tokens[:, 1:])[0]


def counted(windows: int, length: int) -> Any:
    """A sequence for each begin and step: (windows, sequences, length + 1 tokens)."""
    begin, step = np.divmod(np.arange(TOKENS * STEPS), STEPS)
    places = np.arange(length + 1) + length * np.arange(windows)[:, None, None]
    return (begin[:, None] + (step[:, None] + 1) * places) % TOKENS


def remote_embedding(
    workers: Sequence[str],
    *,
    windows: int = 60,
    length: int = 6,
    width: int = 24,
    rate: float = 0.03,
    check_every: int = 15,
) -> Training:
    """A trainer and a parameter server.

    Args:
        workers: the trainer, then the server.
        windows: how many each sequence is read in, one step each.
        length: of a window, in tokens.
        width: of an embedding and of the hidden state.
        rate: of Adam.
        check_every: of how many windows one is held against plain JAX.
    """
    trainer, server = workers

    def program(ctx: Any, params: Any, hidden: Any, tokens: Any) -> Any:
        inputs = ctx.call(server, embedded, params["table"], tokens[:, :-1])
        outputs, hidden = ctx.call(trainer, recurrent, params["cell"], hidden, inputs)
        found, right = ctx.call(server, loss, params["decoder"], outputs, tokens[:, 1:])
        return found, (right, hidden)

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        places = {"table": server, "cell": trainer, "decoder": server}
        params = {
            name: cluster.put(places[name], value)
            for name, value in made(width).items()
        }
        optimizer = jdag.Optimizer(optax.adam(rate), params, clip_norm=1.0)
        zeros = jnp.zeros((TOKENS * STEPS, width))
        hidden = cluster.put(trainer, zeros, tracked=False)
        losses, rights, checks = [], [], []
        for number, tokens in enumerate(counted(windows, length)):
            begun_ns = cluster.now_ns
            with cluster.context() as ctx:
                found, (right, new) = program(ctx, params, hidden, tokens)
                ctx.backward(found)
                if number % check_every == 0:
                    truth = plain(*jdag.fetch((params, hidden)), tokens)
                    checks.append((jdag.fetch(ctx.gradient(params)), truth))
                    run.draw(ctx.graph())
                optimizer.step(ctx)
                losses.append(float(found.fetch()))
                rights.append(float(right.fetch()))
                hidden = cluster.keep(new)  # The former one goes with its last ref.
            run.keep(cluster, (begun_ns, cluster.now_ns))
            run.progress(number + 1, windows, loss=losses[-1], accuracy=rights[-1])
        figures = {
            "accuracy": float(np.mean(rights[-10:])),
            "first_loss": losses[0],
            "final_loss": losses[-1],
        }
        return figures, checks

    return Training(train, FIGURES)
