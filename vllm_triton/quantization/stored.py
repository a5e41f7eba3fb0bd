"""A checkpoint's `quantization_config` as a scheme of each layer. What is not supported is an error that names it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_triton.errors import ModelError
from vllm_triton.quantization.matching import REGEX_PREFIX, by_precedence, is_skipped, matches, why_not_a_pattern
from vllm_triton.quantization.schemes import (
    Int4Layout,
    Int4Scheme,
    LayerKind,
    QuantKey,
    ScaledScheme,
    Scheme,
    Schemes,
    Sharing,
)

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
_FP8 = torch.float8_e4m3fn
_BLOCKS = ([128, 128], (128, 128))
_LINEAR = "Linear"  # the class, a target that others win over
_EACH_ITS_OWN = "mixed-precision"  # the format of a group stands there
_DTYPES = {("int", 8): torch.int8, ("float", 8): _FP8}
# Fields that say how a checkpoint came about, or how another engine runs it.
_SILENT = {
    "awq": "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse meta",
    "gptq": "damp_percent static_groups true_sequential model_name_or_path model_file_base_name meta dataset tokenizer "
    "batch_size block_name_to_quantize cache_block_outputs backend use_exllama module_name_preceding_first_block "
    "max_input_length exllama_config disable_exllama use_cuda_fp16 model_seqlen pad_token_id act_group_aware hyb_act "
    "quantizer mse pack_impl offload_to_disk offload_to_disk_path method",
    "fp8": "",
    "compressed-tensors": "global_compression_ratio quantization_status version provider",
    "scheme": "observer observer_kwargs scale_dtype zp_dtype",
}


def stored_config(config: Mapping[str, Any]) -> Any:
    """What a config.json says of its weights, under its name or its older one; None for full precision."""
    return config.get("quantization_config") or config.get("compression_config")


def stored_schemes(config: Any, source: str) -> Schemes:
    """Args: config: the `quantization_config` of a config.json. source: names the checkpoint in errors.

    Raises: ModelError, which names the field that is wrong or not supported.
    """
    fields = _Fields(config, f"{source}: quantization_config")
    method = fields.get("quant_method")
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
    if not isinstance(method, str) or method not in readers:
        raise fields.error(
            "quant_method",
            f"must be one of {', '.join(METHODS)}, got {method!r}: take the model in full precision instead, which can "
            "be quantized at load",
        )
    fields.skip(*_SILENT[method].split())
    schemes = readers[method](fields)
    fields.check_all_read()
    return schemes


def has_kv_scales(config: Any) -> bool:
    """Whether the checkpoint holds a scale of each layer's keys and of its values, for a cache in fp8."""
    return isinstance(config, Mapping) and bool(config.get("kv_cache_scheme"))


class _Fields:
    """A part of the configuration; errors name the field, and at the end those that nobody read."""

    def __init__(self, config: Any, where: str):
        if not isinstance(config, Mapping):
            raise ModelError(f"{where} must be an object with fields, got {config!r}")
        self.config, self.where = config, where
        self._unread = {name for name, value in config.items() if value not in (None, {}, [])}

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: field {name} {problem}")

    def skip(self, *names: str) -> None:
        self._unread -= set(names)

    def get(self, name: str, default: Any = None) -> Any:
        self.skip(name)
        value = self.config.get(name)
        return default if value is None else value

    def one_of(self, name: str, options: Sequence[Any], default: Any = None) -> Any:
        """Told apart by type too: 1 is not True."""
        value = self.get(name, default)
        if not any(value == option and type(value) is type(option) for option in options):
            raise self.error(name, f"must be {' or '.join(map(repr, options))}, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self.one_of(name, (False, True), default)
        return value

    def names(self, name: str) -> list[str]:
        """A list of layers, or of patterns."""
        values = self.get(name, [])
        if not isinstance(values, list):
            raise self.error(name, f"must be a list of names, got {values!r}")
        for value in values:
            if problem := why_not_a_pattern(value):
                raise self.error(name, problem)
        return values

    def skipped(self, *names: str) -> list[str]:
        """The parts of paths that `is_skipped` takes, under any of several names."""
        found = []
        for name in names:
            for module in self.names(name):
                if problem := why_not_a_pattern(f"{REGEX_PREFIX}{module}"):
                    raise self.error(name, problem)
                found.append(module)
        return found

    def group_size(self, name: str) -> int | None:
        """None for whole rows."""
        size = self.get(name, -1)
        if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and (size < 32 or size % 32)):
            raise self.error(name, f"must be -1 or a multiple of 32, got {size!r}")
        return None if size == -1 else size

    def check_all_read(self) -> None:
        if self._unread:
            name = sorted(self._unread)[0]
            raise self.error(name, f"is not supported, got {self.config[name]!r}")


def _awq(fields: _Fields) -> Schemes:
    fields.one_of("bits", (4,))
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    for name, only in (("checkpoint_format", "gemm"), ("format", "gemm"), ("desc_act", False), ("lm_head", False)):
        fields.one_of(name, (only,), only)
    fields.flag("sym", False)
    size = fields.group_size("group_size")
    scheme = Int4Scheme(Int4Layout.AWQ, size, fields.one_of("zero_point", (True,)), is_ordered=False)
    return _everywhere(scheme, fields.skipped("modules_to_not_convert"))


def _gptq(fields: _Fields) -> Schemes:
    fields.one_of("bits", (4,))
    fields.flag("sym", True)  # a symmetric one stores its zero points too
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.one_of("is_marlin_format", (False,), False)
    formats = ("gptq", "gptq_v2")
    newer_name = fields.one_of("format", formats, "gptq")
    layout = Int4Layout(fields.one_of("checkpoint_format", formats, newer_name))
    size = fields.group_size("group_size")
    scheme = Int4Scheme(layout, size, has_zeros=True, is_ordered=fields.flag("desc_act", False))
    has_head = fields.flag("lm_head", False)
    schemes = _everywhere(scheme, fields.skipped("modules_to_not_convert"), has_head)
    within = fields.get("modules_in_block_to_quantize")
    if within is None:
        return schemes
    if not isinstance(within, list) or not all(isinstance(group, list) for group in within):
        raise fields.error("modules_in_block_to_quantize", f"must be a list of lists of names, got {within!r}")
    ends = tuple(f".{name}" for group in within for name in group)
    return lambda layer, kind: schemes(layer, kind) if kind is LayerKind.HEAD or layer.endswith(ends) else None


def _fp8(fields: _Fields) -> Schemes:
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.one_of("scale_fmt", ("float",), "float")
    fields.one_of("dequantize", (False,), False)
    is_static = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    blocks = fields.get("weight_block_size")
    if blocks is not None:
        if blocks not in _BLOCKS:
            raise fields.error("weight_block_size", f"must be [128, 128], got {blocks!r}")
        if is_static:
            raise fields.error("activation_scheme", "must be dynamic with weight_block_size, got 'static'")
        scheme = ScaledScheme(QuantKey(_FP8, Sharing.BLOCK), QuantKey(_FP8, Sharing.BLOCK), "weight_scale_inv")
    else:
        scheme = ScaledScheme(QuantKey(_FP8, Sharing.TENSOR), _activation(_FP8, is_static), "weight_scale")
    return _everywhere(scheme, fields.skipped("modules_to_not_convert", "ignored_layers"))


def _everywhere(scheme: Scheme, skipped: Sequence[str], has_head: bool = False) -> Schemes:
    """The same for all linear layers and experts but those that are skipped."""
    kinds = {LayerKind.LINEAR, LayerKind.EXPERTS} | ({LayerKind.HEAD} if has_head else set())

    def schemes(layer: str, kind: LayerKind) -> Scheme | None:
        return scheme if kind in kinds and not is_skipped(skipped, layer) else None

    return schemes


def _activation(dtype: torch.dtype, is_static: bool) -> QuantKey:
    return QuantKey(dtype, Sharing.TENSOR, is_static=True) if is_static else QuantKey(dtype, Sharing.ROW)


def _compressed_tensors(fields: _Fields) -> Schemes:
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    default_format = fields.one_of("format", (*formats, _EACH_ITS_OWN))
    groups, ignored = fields.get("config_groups", {}), fields.names("ignore")
    sparsity = _Fields(fields.get("sparsity_config", {}), f"{fields.where}.sparsity_config")
    sparsity.one_of("format", ("dense",), "dense")
    if has_kv_scales(fields.config):
        cached = _Fields(fields.get("kv_cache_scheme"), f"{fields.where}.kv_cache_scheme")
        cached.skip("group_size", "block_structure", "actorder", *_SILENT["scheme"].split())
        for name, value in (("type", "float"), ("num_bits", 8), ("strategy", "tensor"), ("symmetric", True)):
            cached.one_of(name, (value,))
        cached.one_of("dynamic", (False,), False)
        cached.check_all_read()
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", f"must have a group at least, got {groups!r}")
    by_target: dict[str, Scheme] = {}
    for name, group in groups.items():
        part = _Fields(group, f"{fields.where}.config_groups.{name}")
        scheme = _group_scheme(part, part.one_of("format", formats, default_format))
        by_target |= dict.fromkeys(part.names("targets"), scheme)
        part.check_all_read()

    def schemes(layer: str, kind: LayerKind) -> Scheme | None:
        if kind is LayerKind.EMBEDDING or any(matches(pattern, layer) for pattern in ignored):
            return None
        for target in by_precedence(by_target):
            if target != _LINEAR and matches(target, layer):
                return by_target[target]
        return by_target.get(_LINEAR)

    return schemes


def _group_scheme(group: _Fields, stored_format: str) -> Scheme:
    weights = _Fields(group.get("weights", {}), f"{group.where}.weights")
    inputs = group.get("input_activations")
    weights.skip(*_SILENT["scheme"].split())
    kind, bits = weights.one_of("type", ("int", "float")), weights.one_of("num_bits", (4, 8))
    weights.one_of("dynamic", (False,), False)
    if (kind, bits) == ("int", 4):
        if stored_format != Int4Layout.COMPRESSED_TENSORS.value:
            raise group.error("format", f"must be pack-quantized for weights of 4 bits, got {stored_format!r}")
        if inputs is not None:
            raise group.error("input_activations", f"must be null beside weights of 4 bits, got {inputs!r}")
        is_grouped = weights.one_of("strategy", ("group", "channel")) == "group"
        size = weights.group_size("group_size")
        if is_grouped != (size is not None):
            raise weights.error("group_size", f"must be set with strategy group alone, got {size}")
        ordered = weights.one_of("actorder", (None, "static", "weight", "group", "dynamic")) in ("group", "dynamic")
        has_zeros = not weights.flag("symmetric", True)
        weights.check_all_read()
        return Int4Scheme(Int4Layout.COMPRESSED_TENSORS, size, has_zeros, ordered)
    if (kind, bits) not in _DTYPES:
        raise weights.error("num_bits", f"must be 8 for type {kind}, got {bits}")
    dtype = _DTYPES[kind, bits]
    if stored_format == Int4Layout.COMPRESSED_TENSORS.value:
        raise group.error("format", f"must not be {stored_format} for weights of 8 bits")
    if inputs is None:
        raise group.error("input_activations", "must be set for weights of 8 bits, got null")
    weights.one_of("symmetric", (True,), True)
    sharing = Sharing({"channel": "row"}.get(name := weights.one_of("strategy", ("tensor", "channel", "block")), name))
    if sharing is Sharing.BLOCK and (blocks := weights.get("block_structure")) not in _BLOCKS:
        raise weights.error("block_structure", f"must be [128, 128], got {blocks!r}")
    weights.skip("group_size")
    weights.check_all_read()
    return ScaledScheme(QuantKey(dtype, sharing), _input_key(group, inputs, dtype, sharing), "weight_scale")


def _input_key(group: _Fields, inputs: Any, dtype: torch.dtype, weights: Sharing) -> QuantKey:
    fields = _Fields(inputs, f"{group.where}.input_activations")
    fields.skip(*_SILENT["scheme"].split())
    if _DTYPES.get((fields.get("type"), fields.get("num_bits"))) != dtype:
        raise group.error("input_activations", f"must have type and num_bits of the weights, got {inputs!r}")
    fields.one_of("symmetric", (True,), True)
    is_static = not fields.flag("dynamic", False)
    strategy = fields.one_of("strategy", ("tensor", "token", "group"))
    if is_static and strategy != "tensor":
        raise fields.error("strategy", f"must be tensor unless dynamic is true, got {strategy!r}")
    if (strategy == "group") != (weights is Sharing.BLOCK):
        raise fields.error("strategy", f"must be group for weights in blocks, and for them alone, got {strategy!r}")
    if strategy == "group":
        fields.one_of("group_size", (128,))
    fields.skip("group_size")
    fields.check_all_read()
    return QuantKey(dtype, Sharing.BLOCK) if strategy == "group" else _activation(dtype, is_static)
