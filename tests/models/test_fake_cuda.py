"""A forward, and all that a decode step's graph holds, on fake CUDA tensors without a GPU: no host read, no size that
depends on values, and no tensor on the wrong device.
"""

import sys

import pytest
import torch
from tiny import FAMILIES, make_tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_triton.compile.graphs.backend import CaptureError
from vllm_triton.compile.graphs.cuda import HostReads
from vllm_triton.compile.pieces.source import write_source
from vllm_triton.compile.pieces.trace import trace
from vllm_triton.loading import open_checkpoint
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.registry import make_model
from vllm_triton.ops.platforms import CUDA
from vllm_triton.ops.registry import OPS, Capture, Situation, choose
from vllm_triton.runner import compilation, model_runner
from vllm_triton.sampling import metadata as sampling_metadata

NUM_TOKENS, NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE = 7, 3, 9, 16
MAX_POSITIONS = 64


def _config(family, folder):
    make_tiny(family, folder)
    checkpoint = open_checkpoint(str(folder))
    return ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, checkpoint.source)


def _model_and_caches(config):
    """In bfloat16; to be called where tensors are fake."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = make_model(config, MAX_POSITIONS)
    finally:
        torch.set_default_dtype(torch.float32)
    # A copy from the host is all that finish_loading does, and this build of torch cannot fake it.
    for name in dict(model.named_buffers()):
        setattr(model, name, torch.empty(MAX_POSITIONS, config.rope.rotary_size, device="cuda"))
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_size)
    caches = [
        tuple(torch.empty(cache_shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for _ in range(config.num_layers)
    ]
    return model, caches


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_on_fake_cuda(family, tmp_path):
    config = _config(family, tmp_path)
    with FakeTensorMode(), torch.inference_mode():
        model, caches = _model_and_caches(config)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        attention = AttentionMetadata(
            slot_mapping=integers(NUM_TOKENS, dtype=torch.int64),
            block_table=integers(NUM_SEQS, 4),
            seq_lens=integers(NUM_SEQS),
            query_start_loc=integers(NUM_SEQS + 1),
        )
        token_ids = integers(NUM_TOKENS, dtype=torch.int64)
        hidden = model(token_ids, token_ids, attention, caches)
        logits = model.compute_logits(hidden.narrow(0, 0, NUM_SEQS))
    assert hidden.device.type == "cuda" and hidden.shape == (NUM_TOKENS, config.hidden_size)
    assert hidden.dtype == torch.bfloat16
    assert (logits.device.type, logits.dtype, logits.shape) == ("cuda", torch.bfloat16, (NUM_SEQS, config.vocab_size))


class _FakeBuffer:
    """In place of an InputBuffer, whose host array cannot be fake."""

    def __init__(self, *shape, dtype, device):
        self._device = torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, count):
        return self._device[:count]


def _slice(tensor, key):
    """What brackets do; theirs ask this build of torch for a CUDA device."""
    parts = key if isinstance(key, tuple) else (key,)
    if parts[0] is Ellipsis:
        parts = (slice(None),) * (tensor.dim() - len(parts) + 1) + parts[1:]
    for dim, part in enumerate(parts):
        tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
    return tensor


class _WatchedRegions:
    """A backend that runs the stages, watched, and keeps what they return by the graph's name."""

    def __init__(self):
        self.outputs = {}

    def capture(self, name, *stages):
        outputs = ()
        for stage in stages:
            with HostReads(name):
                outputs = stage(*outputs)
            self.outputs.setdefault(name, []).extend(outputs)
        return [None for _ in stages], outputs


@pytest.fixture
def run_step(monkeypatch, tmp_path):
    """`run_step(family, choices)`: what the runner captures for NUM_SEQS requests, in the implementations that CUDA
    prefers or those of `choices`. Their launchers run, and leave out the launch alone. Returns the model's
    configuration, the results of each graph's stages, and the kernels' names.
    """
    launched = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_triton.ops.") and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda kernel, *args: launched.add(kernel.fn.__name__))
    monkeypatch.setattr(model_runner, "InputBuffer", _FakeBuffer)
    monkeypatch.setattr(sampling_metadata, "InputBuffer", _FakeBuffer)

    def run(family, choices=None, spoil=lambda logits: logits):
        config = _config(family, tmp_path)
        for op in OPS.values():
            chosen = choose(op, CUDA, Situation("cuda"), (choices or {}).get(op.name))["chosen"]
            monkeypatch.setattr(op, "_active", op.implementations[chosen])
        backend = _WatchedRegions()
        monkeypatch.setattr(torch.Tensor, "__getitem__", _slice)
        with FakeTensorMode(), torch.inference_mode():
            model, caches = _model_and_caches(config)
            compute_logits = model.compute_logits
            model.compute_logits = lambda hidden: spoil(compute_logits(hidden))
            runner = model_runner.ModelRunner(
                model, caches, torch.device("cuda"), BLOCK_SIZE, NUM_SEQS, NUM_TOKENS, MAX_POSITIONS
            )
            runner.capture_decoding(backend, [NUM_SEQS])
        return config, backend.outputs, launched

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_decode_step_on_fake_cuda(family, run_step):
    config, outputs, launched = run_step(family)
    logits, tokens = outputs["decode 3"][-2:]
    assert launched > {"_embedding_kernel", "_paged_attention_kernel", "_sample_tokens_kernel"}
    assert (logits.device.type, logits.dtype, logits.shape) == ("cuda", torch.bfloat16, (NUM_SEQS, config.vocab_size))
    assert (tokens.device.type, tokens.dtype, tokens.shape) == ("cuda", torch.int64, (NUM_SEQS,))


def test_a_forward_is_traced_for_cuda(tmp_path):
    config = _config("llama3", tmp_path)
    with torch.device("meta"):
        model = make_model(config, MAX_POSITIONS)
        model.cos_sin = torch.empty(MAX_POSITIONS, config.rope.rotary_size)
        caches = [(torch.empty(2, 16, config.num_kv_heads, config.head_size),) * 2 for _ in range(config.num_layers)]
    constants = compilation.constants_of(model, caches)
    source = write_source(trace(compilation.forward_of(model), compilation.INPUTS, constants, torch.device("cuda")))
    assert [call.function for call in source.calls[::2]] == ["piece_0", "piece_1", "piece_1", "piece_2"]
    assert {spec.device for piece in source.pieces for spec in piece.parameters} == {"cuda:0"}


STEP_OPS = ("embedding", "fused_add_rms_norm", "linear", "paged_attention", "reshape_and_cache", "rms_norm")
STEP_OPS += ("rotary_embedding", "sample_tokens", "silu_and_mul")
MOE_OPS = ("fused_moe", "topk_routing")


def _in_torch_calls():
    return [op for op in STEP_OPS + MOE_OPS if OPS[op].implementation("torch").supports(Situation("cuda")) is None]


@pytest.mark.parametrize("op", _in_torch_calls())
def test_ops_in_torch_calls_are_what_they_say_of_themselves(op, run_step):
    family = "mixtral" if op in MOE_OPS else "llama3"
    if OPS[op].implementation("torch").captured_in("cuda") >= Capture.SINGLE_TOKEN_DECODE:
        run_step(family, {op: "torch"})
        return
    with pytest.raises(CaptureError, match=rf"graph decode 3: .*{op}/vectorised\.py:\d+"):
        run_step(family, {op: "torch"})


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda logits: logits * logits.max().item(), "reads a value on the host"),
        (lambda logits: logits.masked_select(logits > 0), "makes a size of values"),
        (lambda logits: logits.cpu().cuda(), "copies between host and device"),
    ],
)
def test_what_cannot_be_captured_in_a_step_is_found(spoil, problem, run_step):
    with pytest.raises(CaptureError, match=rf"graph decode 3: .*{problem}.*test_fake_cuda\.py:\d+"):
        run_step("llama3", spoil=spoil)
