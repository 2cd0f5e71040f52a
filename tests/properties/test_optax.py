"""Each of optax's transformations: as optax does it to all leaves, or refused by name.

The table has a row for each public function of the installed optax, but for what is in
`OTHERS` and `HELPERS`. So a new transformation is tried too, and fails where it needs
arguments, or is refused.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jdag.api.drivers import simulate
from jdag.context.refs import fetch
from jdag.errors import JdagError
from jdag.training.optimizer import Optimizer

contrib: Any = optax.contrib
# Modules of optax, by the ends of their names, without transformations.
OTHERS = (
    *("schedules._schedule", "schedules._join", "losses._classification"),
    *("losses._regression", "losses._self_supervised", "losses._smoothing"),
    *("_src.linear_algebra", "_src.numerics", "_src.update", "_src.utils"),
    *("tree_utils._state_utils", "tree_utils._tree_math", "_microbatching"),
)
HELPERS = (
    *("init_empty_state", "per_example_global_norm_clip"),
    *("per_example_layer_norm_clip", "skip_large_updates", "skip_not_finite"),
    *("value_and_grad_from_state", "contrib.schedule_free_eval_params"),
)
SHAPES = {"bias": (4,), "left": (3, 4), "right": (3, 4)}  # In the order of the tree.
OWNERS = {"bias": "b", "left": "c", "right": "b"}
MASK = {"bias": False, "left": True, "right": True}
LABELS = {"bias": "s", "left": "a", "right": "s"}
TWO = {"a": optax.adam(0.1), "s": optax.sgd(0.3, momentum=0.9)}
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


def often(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


def by_rank(updates: Any, params: Any = None) -> Any:
    leaves, treedef = jax.tree.flatten(updates)
    return jax.tree.unflatten(treedef, [n * one for n, one in enumerate(leaves, 1)])


def norm(updates: Any) -> Any:
    return jnp.sqrt(sum([jnp.sum(one**2) for one in jax.tree.leaves(updates)]))


# Arguments where the learning rate, or none, is not enough.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adaptive_grad_clip": (0.1,),
    "add_noise": (0.1, 0.5, 0),
    "apply_if_finite": (SGD, 3),
    "chain": (optax.clip(0.5), ADAM),
    "clip": (0.1,),
    "clip_by_block_rms": (0.1,),
    "clip_by_global_norm": (0.1,),
    "conditionally_mask": (SGD, often),
    "conditionally_transform": (SGD, often),
    "contrib.differentially_private_aggregate": (1.0, 0.1, 0),
    "contrib.dpsgd": (0.1, 1.0, 0.1, 0),
    "contrib.mechanize": (SGD,),
    "contrib.sam": (SGD, SGD),
    "contrib.schedule_free": (SGD, 0.1),
    "contrib.split_real_and_imaginary": (ADAM,),
    "ema": (0.9,),
    "flatten": (ADAM,),
    "freeze": (MASK,),
    "lookahead": (SGD, 5, 0.5),
    "masked": (ADAM, MASK),
    "measure_with_ema": (lambda updates: updates, 0.9),
    "monitor": ({"norm": norm},),
    "multi_transform": (TWO, LABELS),
    "named_chain": (("first", optax.clip(0.5)), ("second", ADAM)),
    "partition": (TWO, LABELS),
    "scale": (0.1,),
    "scale_by_backtracking_linesearch": (5,),
    "scale_by_schedule": (optax.exponential_decay(1.0, 1, 0.5),),
    "scale_by_zoom_linesearch": (5,),
    "selective_transform": (ADAM,),
    "snapshot": ("norm", norm),
    "stateless": (by_rank,),
    "stateless_with_tree_map": (jnp.multiply,),
    "trace": (0.9,),
    "with_extra_args_support": (ADAM,),
}
MADE: dict[str, Any] = {  # By a function of their own.
    "adafactor": lambda _: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "scale_by_factored_rms": lambda _: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
    "MultiSteps": lambda make: make(ADAM, 2).gradient_transformation(),
    "inject_hyperparams": lambda _: optax.inject_hyperparams(optax.adamw)(0.1),
    "inject_stateful_hyperparams": lambda _: optax.inject_stateful_hyperparams(
        optax.adamw
    )(0.1),
    "selective_transform": lambda _: optax.selective_transform(ADAM, freeze_mask=MASK),
}
MIXING, MORE = "mixes leaves, in {}: ", r"cannot be applied(.|\n)*{}"
REFUSED = {
    **dict.fromkeys(("apply_if_finite", "clip_by_global_norm", "flatten"), MIXING),
    "snapshot": MIXING,
    **dict.fromkeys(("normalize_by_update_norm", "scale_by_lbfgs"), MIXING),
    **dict.fromkeys(("contrib.normalize", "contrib.prodigy"), MIXING),
    **dict.fromkeys(("contrib.dadapt_adamw", "contrib.mechanize"), MIXING),
    "contrib.dog": "mixes leaves, in scale_by_dog: ",
    "contrib.dowg": "mixes leaves, in scale_by_dowg: ",
    **dict.fromkeys(("lookahead", "scale_by_polyak", "contrib.momo"), MORE),
    **dict.fromkeys(("contrib.momo_adam", "contrib.reduce_on_plateau"), MORE),
    **dict.fromkeys(("contrib.hutchinson_estimator_diag_hessian",), MORE),
    **dict.fromkeys(("scale_by_zoom_linesearch", "contrib.scale_by_muon"), MORE),
    "scale_by_backtracking_linesearch": MORE,
    "contrib.differentially_private_aggregate": MORE,
    "contrib.dpsgd": r"cannot be applied(.|\n)*differentially_private_aggregate",
    "contrib.sophia": r"cannot be applied(.|\n)*hutchinson_estimator_diag_hessian",
    "monitor": MORE,
    "lbfgs": r"cannot be applied(.|\n)*scale_by_zoom_linesearch",
    "polyak_sgd": r"cannot be applied(.|\n)*scale_by_polyak",
}


def functions() -> dict[str, Any]:
    found = {}
    for module, before in ((optax, ""), (contrib, "contrib.")):
        for name, value in vars(module).items():
            makes = inspect.isfunction(value) or name == "MultiSteps"
            is_other = before + name in HELPERS or module_of(value).endswith(OTHERS)
            if makes and not name.startswith("_") and not is_other:
                found[before + name] = value
    return found


def module_of(value: Any) -> str:
    return str(getattr(value, "__module__", ""))


FUNCTIONS = functions()


def transformation(name: str) -> Any:
    make = FUNCTIONS[name]
    if name in MADE:
        return MADE[name](make)
    if name in ARGUMENTS:
        return make(*ARGUMENTS[name])
    needed = [
        one.name
        for one in inspect.signature(make).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    assert needed in ([], ["learning_rate"]), f"{name} needs a row in ARGUMENTS"
    return make(*[0.1] * len(needed))


def slope(leaf: Any, number: Any) -> Any:
    return jnp.cos(leaf * (number + 1)) + 0.2


# Of the table the first tier tries a quarter.
ROWS = [
    pytest.param(name, marks=[pytest.mark.second] * (number % 4 != 0))
    for number, name in enumerate(sorted(FUNCTIONS))
]


@pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ROWS)
def test_a_transformation_is_that_of_optax_over_all_leaves_or_refused(name):
    tx = transformation(name)
    params = {
        name: jnp.linspace(0.3 + n, 1.5 + n, int(np.prod(shape))).reshape(shape)
        for n, (name, shape) in enumerate(SHAPES.items())
    }
    with simulate(["a", "b", "c"], seed=0) as cluster:
        refs = {of: cluster.put(OWNERS[of], leaf) for of, leaf in params.items()}
        if name in REFUSED:
            said = REFUSED[name].format(name.removeprefix("contrib."))
            with pytest.raises(JdagError, match=said):
                Optimizer(tx, refs)
            return
        optimizer = Optimizer(tx, refs)
        for number in range(4):
            with cluster.context() as ctx:
                gradients = {
                    of: ctx.call(ref.worker, slope, ref, number)
                    for of, ref in refs.items()
                }
                optimizer.step(ctx, gradients)
        got = fetch(refs)

    @jax.jit
    def step(params, state, number):
        gradients = jax.tree.map(lambda leaf: slope(leaf, number), params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(4):
        params, state = step(params, state, number)
    for of, wanted in params.items():
        np.testing.assert_allclose(got[of], wanted, rtol=1e-9, err_msg=of)
