"""The JAX settings on which the results of functions depend.

Every JAX setting counts unless it is listed in `LEFT_OUT`. Unknown settings, of other
versions of JAX, are compared, so that a mismatch is refused.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax
from jax._src.config import State, bool_state, config_ext, trace_context

from jdag.compute.fingerprint import Once

# One of jdag's own among JAX's settings: so it is compared between processes, passed to
# those that are launched, fixed per cluster, and part of every key of compiled code.
SUMS_IN_FLOAT32 = bool_state(
    "jdag_sums_in_float32",
    False,
    "Whether jdag sums cotangents of fewer than 32 bits in float32. Each sum of up to "
    "eight is then rounded to their dtype.",
    include_in_jit_key=True,
    include_in_trace_context=True,
)

# Patterns of names of settings that do not change results, by reason.
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "where it is computed, and on how many devices": (
        "jax_platforms?(_name)?",
        "jax_default_device",
        "jax_(cuda|rocm|oneapi)_visible_devices",
        "jax_num_cpu_devices",
        "jax_(xla_backend|backend_target|pjrt_client_create_options)",
        "(jax_mock_gpu_topology|mock_num_gpu_processes)",
        "jax_sort_devices_by_process_index",
    ),
    "when it is computed: this process waits for its results": (
        "jax_cpu_enable_async_dispatch",
    ),
    "JAX's own processes, not jdag's": (
        "jax_cpu_get_(global|local)_topology_timeout_minutes",
        "jax_(cross_host|force_dcn|share_binary|distributed|mtls)_.*",
        "jax_enable_(preemption_service|recoverability)",
        "jax_check_proxy_envs",
    ),
    "caches of what was compiled": (
        "jax_(enable_)?compilation_cache.*",
        "jax_persistent_cache_.*",
        "jax_raise_persistent_cache_errors",
        "jax_remove_custom_partitioning_ptr_from_cache_key",
    ),
    "logs and dumps": (
        "jax_log_.*|jax_logging_level",
        "jax_dump_.*|jax_include_.*|jax_pprint_.*",
        "jax_(explain_cache_misses|compiler_detailed_logging_min_ops)",
        "jax_captured_constants_.*",
        "jax_(traceback|tracer_error|send_traceback)_.*",
        "jax_(source_url_schema|hlo_source_file_canonicalization_regex)",
        "jax_pallas_verbose_errors|jax_mosaic_unzip_debug_locations",
    ),
    "checks that raise or warn": (
        "jax_debug_.*|jax_enable_checks|jax_check_tracer_leaks",
        "jax_numpy_rank_promotion|jax_legacy_prng_key|jax_mutable_array_checks",
        "jax_transfer_guard.*|jax_array_garbage_collection_guard|jax_thread_guard",
        "jax_disable_(bwd_checks|vmap_shmap_error)",
        "jax_disallow_mesh_context_manager|jax_no_(tracing|execution)",
        "jax_pallas_(enable_debug_checks|poison_buffers)",
        "jax_raise_on_ppermute_sort_diff|jax_experimental_unsafe_xla_runtime_errors",
    ),
    "how programs are written to files": ("jax2tf_.*|jax_(export|serialization)_.*",),
}

# Checked in each call, in addition to JAX's trace context.
ALSO = (
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_compiler_enable_remat_pass",
)


def sum_in_float32(on: bool = True) -> None:
    """Sum cotangents of bfloat16 and float16 in float32, in this process from now on.

    Sums of up to eight, of which more are made (see `jdag.engine.addends`), are rounded
    once each. Without, each addition is rounded, as in `jax.grad`. Clusters that exist
    refuse to go on; workers that are launched later get the setting, and others have
    to be started with the environment variable JDAG_SUMS_IN_FLOAT32=1.
    """
    jax.config.update("jdag_sums_in_float32", on)


class Configuration(Once):
    """Settings of JAX, by name; equal if all of them are."""

    def __init__(self, settings: tuple[tuple[str, Any], ...]) -> None:
        super().__init__(settings)
        self.settings = settings


@lru_cache(maxsize=1)
def compared() -> tuple[str, ...]:
    """The names of the compared settings, in order."""
    left_out = re.compile("|".join(f"(?:{one})" for one in sum(LEFT_OUT.values(), ())))
    names: Mapping[str, Any] = jax.config.values
    return tuple(sorted(name for name in names if not left_out.fullmatch(name)))


_holders: Mapping[str, Any] = jax.config._value_holders
_ALL = tuple((name, _holders[name]) for name in compared())
_WATCHED = tuple(_holders[name] for name in ALSO)
_value = attrgetter("value")
_STATES = tuple([one for one in _holders.values() if isinstance(one, State)])
# The last one, with its watched values.
_last: list[tuple[Any, Configuration]] = [((), Configuration(()))]


def configuration() -> Configuration:
    """Return the current settings, in this thread.

    Reading all of them takes too long for every call, so they are read again only when
    JAX's trace context or one of `ALSO` has changed; the rest is set once per process.
    """
    watched = (trace_context(), *map(_value, _WATCHED))
    then, last = _last[0]
    if then == watched:
        return last
    found = Configuration(tuple([(name, one.value) for name, one in _ALL]))
    if last == found:
        found = last  # The same object compares faster.
    _last[:] = [(watched, found)]
    return found


def carried() -> Callable[..., Any]:
    """Return a function that calls another one, under the settings of this thread.

    Context managers of JAX count for one thread; what a cluster starts on other threads
    computes under those that it was made in.
    """
    own = [(state, state.get_local()) for state in _STATES]
    own = [(state, value) for state, value in own if value is not config_ext.unset]

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        with ExitStack() as stack:
            for state, value in own:
                stack.enter_context(state(value))
            return fn(*args)

    return call
