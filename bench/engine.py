"""Tokens per second of the engine on three workloads, beside transformers and the machine's roof.

usage: python bench/engine.py [--json] [--with-hf] [--model PATH] [--quantized] [--repeats N] [--kernels op=impl,...]
    --with-hf    measures transformers too, in the same run
    --model      a Hugging Face folder; by default the demo model, written out once in bfloat16
    --quantized  measures the demo model's GGUF file as the engine loads it, instead of its bfloat16 form

Each engine runs in a process of its own, alone; each workload --repeats times after a warm-up, the median counts.
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

import roof
import workloads as w

DTYPE = "bfloat16"


def main() -> None:
    args = _arguments().parse_args()
    if args.engine:
        measure = {"ours": measure_ours, "hf": measure_hf}[args.engine]
        print(json.dumps(measure(args)))
        return
    model = args.model or (demo_gguf() if args.quantized else demo_in_bfloat16())
    result: dict[str, Any] = {"model": Path(model).name, "dtype": DTYPE, "ours": _in_process("ours", model, args)}
    if args.with_hf:
        hf_model = args.model or demo_in_bfloat16()
        result["hf"] = _in_process("hf", hf_model, args)
        result["ratio"] = {
            key: round(value / result["hf"][key], 2) for key, value in result["ours"].items() if key.endswith("tok_s")
        }
    result |= roof.measure() | roof.describe_machine()
    if not args.json:
        for engine in ("ours", "hf"):
            for key, value in result.get(engine, {}).items():
                print(f"{engine:>5}  {key:<18} {value}")
    print(json.dumps(result))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--with-hf", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--engine", choices=["ours", "hf"], help=argparse.SUPPRESS)
    return parser


def _in_process(engine: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", engine, "--model", str(model)]
    command += ["--repeats", str(args.repeats), "--kernels", args.kernels]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_ours(args: argparse.Namespace) -> dict[str, Any]:
    from vllm_triton import LLM, SamplingParams
    from vllm_triton.ops.registry import parse_choices

    start = time.perf_counter()
    llm = LLM(
        args.model, dtype=DTYPE, max_model_len=2048, kernels=parse_choices(args.kernels), enable_prefix_caching=False
    )
    startup = time.perf_counter() - start

    def greedy(new_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def chat(new_tokens: int) -> None:
        llm.chat(w.CHAT, greedy(new_tokens), use_tqdm=False)

    def batch(prompts: list[list[int]], new_tokens: int) -> None:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(new_tokens), use_tqdm=False)

    return _figures("vllm_triton", startup, chat, batch, args.repeats)


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
