"""The settings of JAX that what a function computes depends on.

All that JAX has are of them, also those that come with other versions of it, but for
those that `LEFT_OUT` names with its reasons: who adds none to it may not know what a
setting does, and two processes of which one does as another would not are refused.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
from jax._src.config import trace_context

# Settings that change no number, by why they do not; patterns of their names.
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "where is computed, and of how many devices": (
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
    "JAX's own processes, which jdag's are not": (
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
    "what is said, logged and dumped": (
        "jax_log_.*|jax_logging_level",
        "jax_dump_.*|jax_include_.*|jax_pprint_.*",
        "jax_(explain_cache_misses|compiler_detailed_logging_min_ops)",
        "jax_captured_constants_.*",
        "jax_(traceback|tracer_error|send_traceback)_.*",
        "jax_(source_url_schema|hlo_source_file_canonicalization_regex)",
        "jax_pallas_verbose_errors|jax_mosaic_unzip_debug_locations",
    ),
    "what is looked for, and refused or warned of": (
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

# Watched at each call, beside what JAX traces under.
ALSO = (
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_compiler_enable_remat_pass",
)


class Configuration:
    """Settings of JAX, by name; equal where all of them are."""

    __slots__ = ("_hash", "settings")

    def __init__(self, settings: tuple[tuple[str, Any], ...]) -> None:
        self.settings = settings
        self._hash = hash(settings)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Configuration) and self.settings == other.settings
        )

    def __repr__(self) -> str:
        return f"Configuration({dict(self.settings)})"


@lru_cache(maxsize=1)
def compared() -> tuple[str, ...]:
    """The names of the settings that are compared, in order."""
    left_out = re.compile("|".join(f"(?:{one})" for one in sum(LEFT_OUT.values(), ())))
    names: Mapping[str, Any] = jax.config.values
    return tuple(sorted(name for name in names if not left_out.fullmatch(name)))


class _Watched:
    """Tells that no setting has changed in less time than it takes to read all.

    JAX keys what it traces by what it is traced under, which it has at hand; `ALSO` is
    what may be changed around calls as well. The rest is set once for a process.
    """

    def __init__(self) -> None:
        holders: Mapping[str, Any] = jax.config._value_holders
        self._all = tuple((name, holders[name]) for name in compared())
        self._also = tuple(holders[name] for name in ALSO)
        self._last: tuple[Any, Configuration] | None = None

    def now(self) -> Configuration:
        seen = (trace_context(), [one.value for one in self._also])
        last = self._last
        if last is not None and last[0] == seen:
            return last[1]
        found = Configuration(tuple([(name, one.value) for name, one in self._all]))
        if last is not None and last[1] == found:
            found = last[1]  # What is the same is found so sooner.
        self._last = seen, found
        return found


_WATCHED = _Watched()


def configuration() -> Configuration:
    """Return the settings as they are now, in this thread."""
    return _WATCHED.now()
