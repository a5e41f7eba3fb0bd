"""Quantising at load: from `--quantization int8_per_channel` and `--quantization-config` to a scheme of each layer.

The words are vLLM's (`linear`, `moe`, `ignore`, `targets`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.errors import ConfigError
from vllm_triton.quantization.matching import by_precedence, matches, why_not_a_pattern
from vllm_triton.quantization.schemes import LayerKind, QuantKey, ScaledScheme, Scheme, Sharing


def _scheme(dtype: torch.dtype, weight: Sharing) -> ScaledScheme:
    activation = Sharing.BLOCK if weight is Sharing.BLOCK else Sharing.ROW
    return ScaledScheme(QuantKey(dtype, weight), QuantKey(dtype, activation))


ONLINE: Mapping[str, ScaledScheme] = {
    "fp8_per_tensor": _scheme(torch.float8_e4m3fn, Sharing.TENSOR),
    "fp8_per_channel": _scheme(torch.float8_e4m3fn, Sharing.ROW),
    "fp8_block": _scheme(torch.float8_e4m3fn, Sharing.BLOCK),
    "int8_per_channel": _scheme(torch.int8, Sharing.ROW),
}
FULL_PRECISION = "none"
_SCHEMES: Mapping[str, ScaledScheme | None] = {FULL_PRECISION: None, **ONLINE}
# Small, and what the rest depends on: no pattern means them by the way.
_BY_NAME_ALONE = (LayerKind.EMBEDDING, LayerKind.ROUTER)
_EXPERTS = ".experts"
_KINDS = {"linear": LayerKind.LINEAR, "moe": LayerKind.EXPERTS}


class OnlineSchemes:
    """Asked for each layer once, as the model is built; `check_used` says afterwards what no layer was meant by.

    Args:
        quantization: one of ONLINE, for linear layers and experts that the configuration says nothing else of; or None.
        config: `linear`, `moe`: in place of it, for one kind. `ignore`: layers left in full precision. `targets`: layer
            -> scheme, which wins over the others: a name over patterns, and of those the first. All schemes may be
            "none" too.
    Raises: ConfigError, which names the field.
    """

    def __init__(self, quantization: str | None, config: Mapping[str, Any]):
        base = _SCHEMES[quantization or FULL_PRECISION]
        self._base: dict[LayerKind, ScaledScheme | None] = dict.fromkeys(_KINDS.values(), base)
        ignore, targets = config.get("ignore", []), config.get("targets", {})
        for field in config:
            if field not in (*_KINDS, "ignore", "targets"):
                raise ConfigError(
                    f"quantization_config must have the fields {', '.join(_KINDS)}, ignore or targets, got {field!r}"
                )
        if not isinstance(ignore, list) or not isinstance(targets, dict):
            raise ConfigError("quantization_config: ignore must be a list of layers, and targets map layers to schemes")
        for field, kind in _KINDS.items():
            if field in config:
                self._base[kind] = _named(f"quantization_config field {field}", config[field])
        for pattern in (*ignore, *targets):
            if problem := why_not_a_pattern(pattern):
                raise ConfigError(f"quantization_config: a layer {problem}")
        self._ignore = list(ignore)
        self._targets = {
            pattern: _named(f"quantization_config target {pattern!r}", targets[pattern])
            for pattern in by_precedence(targets)
        }
        self._unused = dict.fromkeys((*self._ignore, *self._targets))
        self._layers: dict[str, None] = {}

    def __call__(self, layer: str, kind: LayerKind) -> Scheme | None:
        if kind is LayerKind.EXPERTS:  # all of them are one layer
            layer = layer[: layer.rindex(_EXPERTS) + len(_EXPERTS)]
        self._layers[layer] = None

        def meant_by(pattern: str) -> bool:
            return pattern == layer or (kind not in _BY_NAME_ALONE and matches(pattern, layer))

        ignoring, targeting = (list(filter(meant_by, patterns)) for patterns in (self._ignore, self._targets))
        for pattern in (*ignoring, *targeting):
            self._unused.pop(pattern, None)
        if ignoring:
            return None
        scheme = self._targets[targeting[0]] if targeting else self._base.get(kind)
        if scheme is not None and kind is LayerKind.EMBEDDING:
            raise ConfigError(f"quantization_config: {layer} is an embedding, which stays in full precision: {scheme}")
        return scheme

    def check_used(self) -> None:
        """Raises: ConfigError for a pattern that no layer matches."""
        if self._unused:
            raise ConfigError(
                f"quantization_config: no layer of this model matches {', '.join(map(repr, self._unused))}; "
                f"they are named as {', '.join(list(self._layers)[1:8])} ..."
            )


def _named(what: str, name: Any) -> ScaledScheme | None:
    if not isinstance(name, str) or name not in _SCHEMES:
        raise ConfigError(f"{what} must be one of {', '.join(_SCHEMES)}, got {name!r}")
    return _SCHEMES[name]
