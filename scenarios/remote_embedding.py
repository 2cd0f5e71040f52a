"""A recurrent net whose embedding and decoder are remote, as in PyTorch's rpc/rnn.

The parameter server has the table of embeddings and the decoder; the trainer has the
recurrent cell between them. Each sequence counts in steps of 1 to 4, modulo the number
of tokens, and is read in windows, one context each. The hidden state is carried from
window to window, but gradients are not (truncated backpropagation through time). So
the net must carry the step of each sequence in this state.
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
    "accuracy": "accuracy of the next tokens over the last 10 windows",
    "first_loss": "mean cross-entropy of the first window, nats",
    "final_loss": "mean cross-entropy of the last window, nats",
}
TOKENS, STEPS = 12, 4


def embedded(table: Array, tokens: Array) -> Array:
    """Look up embeddings: (sequences, length) to (sequences, length, width)."""
    return table[tokens]


def recurrent(cell: Mapping[str, Array], hidden: Array, inputs: Array) -> Any:
    """Run a gated recurrent unit. Returns (outputs, hidden state)."""

    def step(hidden: Array, x: Array) -> tuple[Array, Array]:
        gates = jax.nn.sigmoid(x @ cell["x_gates"] + hidden @ cell["h_gates"])
        reset, update = jnp.split(gates, 2, axis=-1)
        new = jnp.tanh(x @ cell["x_new"] + (reset * hidden) @ cell["h_new"])
        hidden = update * hidden + (1 - update) * new
        return hidden, hidden

    hidden, outputs = jax.lax.scan(step, hidden, jnp.swapaxes(inputs, 0, 1))
    return jnp.swapaxes(outputs, 0, 1), hidden


def loss(decoder: Array, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Return the mean cross-entropy and the accuracy of the next tokens."""
    scores = outputs @ decoder
    each = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return jnp.mean(each), jnp.mean(jnp.argmax(scores, axis=-1) == targets)


def made(width: int) -> dict[str, Any]:
    """Return the initial parameters."""
    draw = np.random.default_rng(0).standard_normal
    gates, new = (width, 2 * width), (width, width)
    shapes = {"x_gates": gates, "h_gates": gates, "x_new": new, "h_new": new}
    return {
        "table": jnp.asarray(draw((TOKENS, width))),
        "cell": {name: jnp.asarray(0.2 * draw(shapes[name])) for name in shapes},
        "decoder": jnp.asarray(0.2 * draw((width, TOKENS))),
    }


@jax.jit
@jax.grad
def plain(params: Any, hidden: Array, tokens: Array) -> Array:
    """Compute the gradient of a window's loss by plain JAX."""
    inputs = embedded(params["table"], tokens[:, :-1])
    outputs, _ = recurrent(params["cell"], hidden, inputs)
    return loss(params["decoder"], outputs, tokens[:, 1:])[0]


def counted(windows: int, length: int) -> Any:
    """Return the tokens of all windows: (windows, sequences, length + 1)."""
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
    """Make the scenario's player, with a trainer and a parameter server.

    Args:
        workers: the trainer, then the server.
        windows: number of windows of each sequence, with one step each.
        length: number of tokens of a window.
        width: width of an embedding and of the hidden state.
        rate: learning rate of Adam.
        check_every: number of windows from one comparison with plain JAX to the next.
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
                value, (right, new) = program(ctx, params, hidden, tokens)
                ctx.backward(value)
                if number % check_every == 0:
                    truth = plain(*jdag.fetch((params, hidden)), tokens)
                    checks.append((jdag.fetch(ctx.gradient(params)), truth))
                    run.draw(ctx.graph())
                optimizer.step(ctx)
                losses.append(float(value.fetch()))
                rights.append(float(right.fetch()))
                hidden = cluster.keep(
                    new
                )  # The old state is dropped with its last ref.
            run.keep(cluster, (begun_ns, cluster.now_ns))
            run.progress(number + 1, windows, loss=losses[-1], accuracy=rights[-1])
        figures = {
            "accuracy": float(np.mean(rights[-10:])),
            "first_loss": losses[0],
            "final_loss": losses[-1],
        }
        return figures, checks

    return Training(train, FIGURES)
