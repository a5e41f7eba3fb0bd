"""What surrounds a kernel in Triton: autotuning, heuristics, timing, and what a compiled kernel tells of itself."""

import pytest
import torch
import triton
import triton.language as tl


def _accumulate(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets) if EVEN else tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.load(out_ptr + offsets, mask=mask) + x, mask=mask)


HEURISTICS = {"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0}
CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 64, 256)]


def grid(arguments):
    return (triton.cdiv(arguments["n"], arguments["BLOCK"]),)


@pytest.mark.parametrize("keeping", [{"restore_value": ["out_ptr"]}, {"reset_to_zero": ["out_ptr"]}])
def test_autotune_leaves_no_trace_of_its_trials(keeping):
    tried = []

    def prune(configs, arguments, **keywords):
        tried.append(arguments["n"])
        return [config for config in configs if config.kwargs["BLOCK"] <= arguments["n"]]

    kernel = triton.heuristics(HEURISTICS)(triton.jit(_accumulate))
    kernel = triton.autotune(CONFIGS, key=["n"], prune_configs_by={"early_config_prune": prune}, **keeping)(kernel)
    for n in (100, 128, 100):
        x, out = torch.randn(n), torch.ones(n)
        is_reset = "reset_to_zero" in keeping and n not in tried  # before trials alone
        kernel[grid](x, out, n)
        assert torch.equal(out, x if is_reset else x + 1)
        assert kernel.best_config in CONFIGS[:2]
    assert tried == [100, 128]
    timings = kernel.configs_timings
    assert all(0 < quantile < 1e4 for times in timings.values() for quantile in times)


def test_do_bench_orders_its_quantiles():
    x, out = torch.randn(4096), torch.zeros(4096)
    kernel = triton.jit(_accumulate)
    low, middle, high = triton.testing.do_bench(
        lambda: kernel[(16,)](x, out, 4096, 256, EVEN=True), warmup=1, rep=5, quantiles=[0.1, 0.5, 0.9]
    )
    assert 0 < low <= middle <= high
    times = triton.testing.do_bench(
        lambda: kernel[(16,)](x, out, 4096, 256, EVEN=True), warmup=1, rep=5, return_mode="all"
    )
    assert len(times) > 0 and min(times) > 0


def test_compiled_kernel_tells_of_itself_and_runs():
    kernel = triton.jit(_accumulate)
    compiled = kernel.warmup(torch.float32, torch.float32, 100, BLOCK=32, EVEN=False, grid=(1,))
    assert compiled.metadata.name == compiled.name == "_accumulate"
    assert compiled.metadata.target.backend == "cpu" and compiled.metadata.shared == 0
    assert {"ttir", "cpp", "so"} <= set(compiled.asm)
    assert 'extern "C" void _accumulate(' in compiled.asm["cpp"] and compiled.asm["so"][:4] == b"\x7fELF"
    assert compiled.hash == kernel.warmup(torch.float32, torch.float32, 99, BLOCK=32, EVEN=False, grid=(1,)).hash
    x, out = torch.randn(100), torch.ones(100)
    compiled[(4, 1, 1)](x, out, 100, 32, False)
    assert torch.equal(out, x + 1)
    assert compiled.n_spills == 0 and compiled.n_regs == 0
