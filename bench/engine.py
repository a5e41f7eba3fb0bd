"""Tokens per second of the engine on three workloads, beside transformers and the machine's roof.

usage: python bench/engine.py [--json] [--with-hf] [--model PATH] [--quantized] [--repeats N] [--kernels op=impl,...]
                              [--compile-backend eager|inductor] [--quantization NAME]
       python bench/engine.py --breakdown [--json] [--model PATH] [--quantized] [--kernels op=impl,...]
    --with-hf    measures transformers too, in the same run
    --breakdown  says where the time of a decode step goes, instead
    --model      a Hugging Face folder; by default the demo model, written out once in bfloat16
    --quantized  measures the demo model's GGUF file, whose weights stay packed, instead of its bfloat16 form
    --quantization  the engine's setting of that name: int8_per_channel, for one

Each engine runs in a process of its own, alone; each workload --repeats times after a warm-up, the median counts.
rss_ratio is the growth of the resident memory from the imports to the first tokens, over the bytes of the weights and
of a KV cache just large enough; rss_ratio_full the same after the workloads, when every block of the cache was written.
The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breakdown
import roof
import workloads as w

DTYPE = "bfloat16"


def main() -> None:
    args = _arguments().parse_args()
    if args.engine:
        measure = {"ours": measure_ours, "hf": measure_hf, "breakdown": measure_breakdown}[args.engine]
        print(json.dumps(measure(args)))
        return
    model = args.model or (demo_gguf() if args.quantized else demo_in_bfloat16())
    result: dict[str, Any] = {"model": Path(model).name, "dtype": DTYPE, "quantization": args.quantization}
    if args.breakdown:
        result["breakdown"] = _in_process("breakdown", model, args)
    else:
        result["ours"] = _in_process("ours", model, args)
    if args.with_hf:
        hf_model = args.model or demo_in_bfloat16()
        result["hf"] = _in_process("hf", hf_model, args)
        result["ratio"] = {
            key: round(value / result["hf"][key], 2) for key, value in result["ours"].items() if key.endswith("tok_s")
        }
    result |= roof.measure() | roof.describe_machine()
    if not args.json:
        for batch, figures in result.get("breakdown", {}).items():
            print(*breakdown.table(int(batch), figures), sep="\n")
        for engine in ("ours", "hf"):
            for key, value in result.get(engine, {}).items():
                print(f"{engine:>5}  {key:<18} {value}")
    print(json.dumps(result))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--with-hf", action="store_true")
    what.add_argument("--breakdown", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--compile-backend", help="eager or inductor; by default the platform's")
    parser.add_argument("--engine", choices=["ours", "hf", "breakdown"], help=argparse.SUPPRESS)
    return parser


def _in_process(engine: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", engine, "--model", str(model)]
    command += ["--repeats", str(args.repeats), "--kernels", args.kernels, "--quantization", args.quantization]
    command += ["--compile-backend", args.compile_backend] if args.compile_backend else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Of the engine, in all measurements."""
    from vllm_triton.ops.registry import parse_choices

    return {
        "model": args.model,
        "dtype": DTYPE,
        "quantization": args.quantization,
        "max_model_len": 2048,
        "block_size": w.BLOCK_SIZE,
        "kernels": parse_choices(args.kernels),
        "compile_backend": args.compile_backend,
    }


def measure_ours(args: argparse.Namespace) -> dict[str, Any]:
    from vllm_triton import LLM

    imported = roof.resident_bytes()
    start = time.perf_counter()
    llm = LLM(**_settings(args), num_kv_blocks=w.KV_BLOCKS, enable_prefix_caching=False)
    startup = time.perf_counter() - start

    def chat(new_tokens: int) -> None:
        llm.chat(w.CHAT, w.greedy(new_tokens), use_tqdm=False)

    def batch(prompts: list[list[int]], new_tokens: int) -> None:
        w.generate(llm, prompts, new_tokens)

    chat(8)
    first = roof.resident_bytes()
    figures = _figures("vllm_triton", startup, chat, batch, args.repeats)
    runner = llm.core.runner
    weights = sum(weight.nbytes for weight in runner.model.parameters())
    cache = sum(half.nbytes for layer in runner.kv_caches for half in layer)
    return figures | {
        "rss_ratio": round((first - imported) / (weights + cache), 3),
        "rss_ratio_full": round((roof.resident_bytes() - imported) / (weights + cache), 3),
        "weights_mib": round(weights / 2**20, 1),
        "kv_cache_mib": round(cache / 2**20, 1),
    }


def measure_breakdown(args: argparse.Namespace) -> dict[str, Any]:
    """Number of requests -> where the time of a step goes in which they all decode."""
    from vllm_triton import LLM

    llm = LLM(**_settings(args), num_kv_blocks=w.BREAKDOWN_KV_BLOCKS)
    result = {}
    for batch, new_tokens in w.BREAKDOWN.items():
        prompts = w.random_prompts(batch, w.BREAKDOWN_PROMPT_TOKENS)
        with breakdown.step_times(llm) as clock:
            w.generate(llm, prompts, new_tokens)
        result[str(batch)] = breakdown.summarise(breakdown.decode_steps(clock.steps, batch))
    return result


def measure_hf(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    startup = time.perf_counter() - start

    def generate(ids: "torch.Tensor", new_tokens: int) -> None:
        limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits)

    def chat(new_tokens: int) -> None:
        inputs = tokenizer.apply_chat_template(
            w.CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generate(inputs["input_ids"], new_tokens)

    def batch(prompts: list[list[int]], new_tokens: int) -> None:
        generate(torch.tensor(prompts), new_tokens)

    return _figures("transformers", startup, chat, batch, args.repeats)


def _figures(
    engine: str,
    startup: float,
    chat: Callable[[int], None],
    batch: Callable[[list[list[int]], int], None],
    repeats: int,
) -> dict[str, Any]:
    w2_prompts = w.random_prompts(w.W2_REQUESTS, w.W2_PROMPT_TOKENS)
    w3_prompts = w.random_prompts(w.W3_REQUESTS, w.W3_PROMPT_TOKENS)
    chat(8)
    w1 = _median_seconds(lambda: chat(w.W1_NEW_TOKENS), repeats)
    w2 = _median_seconds(lambda: batch(w2_prompts, w.W2_NEW_TOKENS), repeats)
    w3 = _median_seconds(lambda: batch(w3_prompts, 1), repeats)
    return {
        "engine": engine,
        "startup_s": round(startup, 1),
        "w1_output_tok_s": round(w.W1_NEW_TOKENS / w1, 1),
        "w2_output_tok_s": round(w.W2_REQUESTS * w.W2_NEW_TOKENS / w2, 1),
        "w3_prompt_tok_s": round(w.W3_REQUESTS * w.W3_PROMPT_TOKENS / w3, 1),
    }


def _median_seconds(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def demo_gguf() -> str:
    from vllm_triton.loading import find_demo_model

    return str(find_demo_model())


def demo_in_bfloat16() -> str:
    """The demo model as a Hugging Face folder that both engines read, made once by transformers."""
    gguf = Path(demo_gguf())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "vllm_triton" / "bench" / f"{gguf.stem}-bf16"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        dequantised = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dequantised
        )
        model.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
