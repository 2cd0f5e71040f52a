"""The JAX settings on which the results of functions depend.

Every JAX setting counts unless it is listed in `LEFT_OUT`. Unknown settings (from other
versions of JAX) are compared too, so that a mismatch is refused.
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

# jdag's own setting is a JAX setting. So it is compared between processes, passed to
# launched processes, fixed per cluster, and part of every key of compiled code.
SUMS_IN_FLOAT32 = bool_state(
    "jdag_sums_in_float32",
    False,
    "Whether jdag sums cotangents of fewer than 32 bits in float32. Each sum of up to "
    "eight addends is then rounded once, to their dtype.",
    include_in_jit_key=True,
    include_in_trace_context=True,
)

# Patterns of the names of settings that do not change results, by reason.
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "choice and number of devices": (
        "jax_platforms?(_name)?",
        "jax_default_device",
        "jax_(cuda|rocm|oneapi)_visible_devices",
        "jax_num_cpu_devices",
        "jax_(xla_backend|backend_target|pjrt_client_create_options)",
        "(jax_mock_gpu_topology|mock_num_gpu_processes)",
        "jax_sort_devices_by_process_index",
    ),
    "time of execution: jdag waits for results": ("jax_cpu_enable_async_dispatch",),
    "processes of JAX's own runtime": (
        "jax_cpu_get_(global|local)_topology_timeout_minutes",
        "jax_(cross_host|force_dcn|share_binary|distributed|mtls)_.*",
        "jax_enable_(preemption_service|recoverability)",
        "jax_check_proxy_envs",
    ),
    "caches of compiled code": (
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
    "formats of exported programs": ("jax2tf_.*|jax_(export|serialization)_.*",),
}

# Settings read in each call, in addition to JAX's trace context.
WATCHED_NAMES = (
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_compiler_enable_remat_pass",
)


def sum_in_float32(on: bool = True) -> None:
    """Sum cotangents of bfloat16 and float16 in float32, in this process from now on.

    Each sum of up to eight addends is rounded once (larger sums are trees of these, see
    `jdag.engine.addends`). Without the setting each addition is rounded, as in
    `jax.grad`.

    Call it before making a cluster: existing clusters refuse further work. Workers
    launched later get the setting; start other workers with the environment variable
    JDAG_SUMS_IN_FLOAT32=1.
    """
    jax.config.update("jdag_sums_in_float32", on)


class Configuration(Once):
    def __init__(self, settings: tuple[tuple[str, Any], ...]) -> None:
        super().__init__(settings)
        self.settings = settings


@lru_cache(maxsize=1)
def compared() -> tuple[str, ...]:
    left_out = re.compile("|".join(f"(?:{p})" for p in sum(LEFT_OUT.values(), ())))
    names: Mapping[str, Any] = jax.config.values
    return tuple(sorted(name for name in names if not left_out.fullmatch(name)))


_holders: Mapping[str, Any] = jax.config._value_holders
_ALL = tuple((name, _holders[name]) for name in compared())
_WATCHED = tuple(_holders[name] for name in WATCHED_NAMES)
_value = attrgetter("value")
_STATES = tuple([state for state in _holders.values() if isinstance(state, State)])
# The last configuration, with the watched values under which it was read.
_last: list[tuple[Any, Configuration]] = [((), Configuration(()))]


def configuration() -> Configuration:
    """Return the current settings of this thread.

    Reading all settings takes too long for every call, so they are read again only when
    JAX's trace context or one of `WATCHED_NAMES` has changed. The other settings are
    set once per process.
    """
    watched = (trace_context(), *map(_value, _WATCHED))
    last_watched, last = _last[0]
    if last_watched == watched:
        return last
    current = Configuration(tuple([(name, holder.value) for name, holder in _ALL]))
    if last == current:
        current = last  # Identical objects compare faster.
    _last[:] = [(watched, current)]
    return current


def with_local_settings() -> Callable[..., Any]:
    """Return a function that calls its argument under this thread's settings.

    JAX's context managers affect only one thread, so a cluster uses the returned
    function on its other threads.
    """
    local = [(state, state.get_local()) for state in _STATES]
    local = [(state, value) for state, value in local if value is not config_ext.unset]

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        with ExitStack() as stack:
            for state, value in local:
                stack.enter_context(state(value))
            return fn(*args)

    return call
