"""torch.compile writes Triton kernels for the CPU, and this backend runs them."""

import pytest
import torch
import torch._inductor.config as inductor
import triton
from torch._inductor.utils import run_and_get_code

from vllm_triton.ops.testing.tolerance import assert_within_rounding


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Nothing that an earlier run compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with inductor.patch(cpu_backend="triton", force_disable_caches=True, compile_threads=1):
        yield
    torch._dynamo.reset()


def pointwise(x, weight, bias):
    return torch.nn.functional.gelu(x * weight + bias, approximate="tanh") * torch.sigmoid(x).rsqrt()


def reduction(x, weight, bias):
    return (x * weight).sum(-1), x.amax(0), (x + bias).var(-1), x.argmax(-1)


def softmax(x, weight, bias):
    return torch.softmax(x * weight, -1) + torch.log_softmax(x + bias, -1)


def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5) + x


def long_softmax(x, weight, bias):
    """Rows too long for one tile: Inductor loops over them."""
    return torch.softmax(torch.cat([x] * 20, -1), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function", [pointwise, reduction, softmax, layer_norm, long_softmax], ids=lambda f: f.__name__
)
def test_equals_eager(function, dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((37, 301), (301,), (301,)))
    launched = []
    triton.knobs.runtime.launch_enter_hook.add(launched.append)
    try:
        actual, code = run_and_get_code(torch.compile(function, fullgraph=True), x, weight, bias)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(launched.append)
    assert "triton_heuristics" in code[0] and "cpp_fused" not in code[0] and launched
    eager = function(x, weight, bias)
    exact = function(x.double(), weight.double(), bias.double())
    if isinstance(actual, torch.Tensor):
        actual, eager, exact = (actual,), (eager,), (exact,)
    for number, outputs in enumerate(zip(actual, exact, eager, strict=True)):
        assert_within_rounding(*outputs, what=f"output {number}")


def test_other_sizes_and_gradients():
    def loss(x, weight):
        return (torch.nn.functional.layer_norm(x, x.shape[-1:], weight) ** 2).softmax(-1)[:, ::3].sum()

    compiled = torch.compile(loss, dynamic=True)
    for rows, columns in ((5, 33), (64, 128), (1, 7)):
        x, weight = torch.randn(rows, columns), torch.randn(columns)

        def gradients(function, x, weight):
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(function(x, weight), (x, weight))

        exact = gradients(loss, x.double(), weight.double())
        for outputs in zip(gradients(compiled, x, weight), exact, gradients(loss, x, weight), strict=True):
            assert_within_rounding(*outputs)
