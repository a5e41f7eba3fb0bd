"""Which manager keeps the blocks of which kind of cache."""

from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache.manager import KVCacheManager
from vllm_triton.kv_cache.spec import FullAttentionSpec, KVCacheSpec

_MANAGERS: dict[type[KVCacheSpec], type[KVCacheManager]] = {FullAttentionSpec: KVCacheManager}


def register_manager(spec_class: type[KVCacheSpec], manager_class: type[KVCacheManager]) -> None:
    """Gives a spec class, and its subclasses without an entry, a manager. Raises: ConfigError if it has one."""
    if spec_class in _MANAGERS:
        raise ConfigError(f"{spec_class.__name__} already has the manager {_MANAGERS[spec_class].__name__}")
    _MANAGERS[spec_class] = manager_class


def manager_class_for(spec_class: type[KVCacheSpec]) -> type[KVCacheManager]:
    """The manager of the nearest class in the spec's MRO. Raises: ConfigError that lists the known specs."""
    for base in spec_class.__mro__:
        if base in _MANAGERS:
            return _MANAGERS[base]
    known = ", ".join(sorted(known_class.__name__ for known_class in _MANAGERS))
    raise ConfigError(f"no KV cache manager for {spec_class.__name__}: register one, or derive it from one of {known}")
