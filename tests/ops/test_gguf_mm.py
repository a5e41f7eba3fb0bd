import gguf
import numpy as np
import pytest
import torch
from gguf_files import random_rows

from vllm_triton.ops import gguf_mm
from vllm_triton.ops.errors import ShapeError
from vllm_triton.ops.gguf_mm.kernel import select_config
from vllm_triton.ops.gguf_mm.layout import FORMATS, format_of, pack, unpack
from vllm_triton.ops.gguf_mm.op import packed_dims
from vllm_triton.ops.testing import assert_within_rounding
from vllm_triton.ops.testing.inputs import make_inputs

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(gguf_mm.implementations))
RNG = np.random.default_rng(0)
EACH_FORMAT = pytest.mark.parametrize("name", list(FORMATS))


@EACH_FORMAT
@pytest.mark.parametrize("num_rows", [1, 32, 75])
def test_packing_keeps_every_value(name, num_rows):
    """As the gguf package reads them, bit for bit."""
    rows = random_rows(name, num_rows, 512, RNG)
    quants, scales = pack(torch.from_numpy(rows), name)
    assert format_of(512, quants.shape[1], scales.shape[1]) == FORMATS[name]
    weight = unpack(quants, scales, 512, torch.float32)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(weight[:num_rows].numpy(), expected)
    assert not weight[num_rows:].any()


@EACH_FORMAT
def test_packed_size_is_the_file_s(name):
    rows = random_rows(name, 64, 512, RNG)
    quants, scales = pack(torch.from_numpy(rows), name)
    assert rows.nbytes <= quants.nbytes + scales.nbytes <= rows.nbytes * (1.03 if name == "Q4_K" else 1)


@EACH_FORMAT
@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_each_input_meets_its_column(name, implementation, num_tokens):
    """Each token has one input, a 1, at a place of its own: its result is a column of the weight."""
    places = torch.arange(256).reshape(-1, num_tokens)[:: 256 // num_tokens // 8]
    rows = random_rows(name, 32, 256, RNG)
    weight = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[name]))
    packed = pack(torch.from_numpy(rows), name)
    for some in places:
        x = torch.zeros(num_tokens, 256)
        x[torch.arange(num_tokens), some] = 1
        out = gguf_mm.implementations[implementation](x, *packed, None)
        torch.testing.assert_close(out, weight.T[some], rtol=1e-6, atol=1e-5 * float(weight.abs().max()))


@pytest.mark.parametrize(
    "name, num_bytes, message",
    [
        ("Q4_1", 50, "a row of Q4_1 must be a multiple of 20 bytes, got 50"),
        ("Q2_K", 84, "must be one of Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, got Q2_K"),
    ],
)
def test_pack_refuses(name, num_bytes, message):
    with pytest.raises(ValueError, match=message):
        pack(torch.zeros(3, num_bytes, dtype=torch.uint8), name)


def test_a_weight_for_other_inputs_is_refused():
    inputs = make_inputs(gguf_mm.contract, packed_dims("Q4_1", 64, T=2, J=1), torch.float32)
    inputs["x"] = torch.zeros(2, 96)
    with pytest.raises(ShapeError, match=r"gguf_mm: quants and scales must .* \(Q6_K\); got 8 and 4 for 96 inputs"):
        gguf_mm(*inputs.values())


@pytest.mark.parametrize("depth", [32, 96, 576, 1536, 4096])
def test_tiles_cover_the_inputs(depth):
    for num_tokens in (1, 3, 400):
        for device in ("cpu", "cuda"):
            config = select_config(num_tokens, depth, "Q4_1", torch.bfloat16, device)
            assert config.block_k <= depth
            rest = depth % config.block_k
            assert rest % config.rest_k == 0 if rest else config.rest_k == 0


@EACH_FORMAT
@IMPLEMENTATIONS
def test_inputs_that_no_tile_holds_alone(name, implementation):
    """A depth of whole tiles and a rest, where the format admits one."""
    depth = 288 if FORMATS[name].block == 32 else 768
    inputs = make_inputs(gguf_mm.contract, packed_dims(name, depth, T=9, J=2), torch.float32)
    exact = gguf_mm.reference(inputs["x"].double(), *list(inputs.values())[1:3], inputs["bias"].double())
    eager = gguf_mm.reference(*inputs.values())
    assert_within_rounding(gguf_mm.implementations[implementation](*inputs.values()), exact, eager)
