"""AsyncEngine: streams, ends, failures, shutdown."""

import asyncio
import random
import threading

import pytest
from tiny import VOCAB_SIZE

from vllm_triton import SamplingParams
from vllm_triton.config import EngineConfig
from vllm_triton.engine import core
from vllm_triton.engine.async_engine import AsyncEngine
from vllm_triton.engine.core import EngineCore
from vllm_triton.errors import EngineDeadError, RequestError
from vllm_triton.loading import find_demo_model
from vllm_triton.serve.metrics import Metrics

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_core(tiny_folder) -> EngineCore:
    return EngineCore(_config(tiny_folder))


def _config(folder: str) -> EngineConfig:
    sizes = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return EngineConfig(folder, dtype="float32", skip_tokenizer_init=True, **sizes)


class Listener:
    """Keeps what it is told."""

    def __init__(self):
        self.stats, self.first, self.tokens, self.gaps, self.finished = None, [], 0, 0, []
        self.stepped = asyncio.Event()

    def on_step(self, stats):
        self.stats = stats
        self.stepped.set()

    def on_first_token(self, seconds, num_prompt_tokens):
        self.first.append(num_prompt_tokens)

    def on_tokens(self, num_tokens):
        self.tokens += num_tokens

    def on_inter_token(self, seconds):
        self.gaps += 1

    def on_finished(self, stats):
        self.finished.append(stats)

    async def until(self, condition):
        """Waits for a report of the engine for which the condition holds."""
        async with asyncio.timeout(30):
            while self.stats is None or not condition(self.stats):
                self.stepped.clear()
                await self.stepped.wait()


def _run(core: EngineCore, config: EngineConfig, body) -> None:
    """Runs body(engine, listener) on a fresh engine over a loaded core, and checks that nothing is left behind."""

    async def main():
        listener = Listener()
        engine = AsyncEngine(config, core, listener)
        await engine.start()
        try:
            await body(engine, listener)
        finally:
            await engine.shutdown(drain_seconds=0)
        core.scheduler.check_integrity()

    asyncio.run(main())


def _prompt(engine: AsyncEngine, seed: int = 0, length: int = 12):
    draw = random.Random(seed)
    return engine.renderer.render_prompt([draw.randrange(3, VOCAB_SIZE) for _ in range(length)])


async def _all(stream):
    return [output async for output in stream]


def test_deltas_join_to_the_final_output():
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    config = EngineConfig(str(find_demo_model()), dtype="float32", **sizes)

    async def body(engine, listener):
        prompt = engine.renderer.render_chat([{"role": "user", "content": "Count to five, with emojis: 😀"}])
        params = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=40, logprobs=1, stop=["three", "3"])
        [final] = await _all(engine.generate(prompt, params, "whole"))
        deltas = await _all(engine.generate(prompt, params, "streamed", delta=True))
        assert len(deltas) > 5 and deltas[-1].finished and not any(delta.finished for delta in deltas[:-1])
        for choice in final.outputs:
            parts = [part for delta in deltas for part in delta.outputs if part.index == choice.index]
            assert "".join(part.text for part in parts) == choice.text
            assert [token for part in parts for token in part.token_ids] == choice.token_ids
            assert len([entry for part in parts for entry in part.logprobs]) == len(choice.logprobs)
            assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1].finish_reason == choice.finish_reason

    _run(EngineCore(config), config, body)


def test_tokens_appear_as_they_are_made(tiny_core, tiny_folder):
    async def body(engine, listener):
        outputs = await _all(engine.generate(_prompt(engine), LONG, "a", delta=True))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 200
        assert listener.tokens == 200 and listener.first == [12] and listener.gaps == 199
        [finished] = listener.finished
        assert (finished.finish_reason, finished.num_generation_tokens, finished.n) == ("length", 200, 1)
        assert 0 < finished.time_to_first_token < finished.e2e_latency

    _run(tiny_core, _config(tiny_folder), body)


def test_requests_run_together(tiny_core, tiny_folder):
    async def body(engine, listener):
        alone = [await _all(engine.generate(_prompt(engine, seed), LONG, f"a{seed}")) for seed in range(4)]
        together = await asyncio.gather(*(_all(engine.generate(_prompt(engine, s), LONG, f"b{s}")) for s in range(4)))
        assert [o[0].outputs[0].token_ids for o in together] == [o[0].outputs[0].token_ids for o in alone]

    _run(tiny_core, _config(tiny_folder), body)


def test_closing_a_stream_frees_its_blocks(tiny_core, tiny_folder):
    async def body(engine, listener):
        stream = engine.generate(_prompt(engine), LONG, "a", delta=True)
        await anext(stream)
        await stream.aclose()
        await listener.until(lambda stats: stats.num_running == 0 and stats.kv_cache_usage == 0)
        assert engine.num_unfinished_requests == 0
        assert [finished.finish_reason for finished in listener.finished] == ["abort"]

    _run(tiny_core, _config(tiny_folder), body)


def test_totals_never_shrink(tiny_core, tiny_folder, monkeypatch):
    """In what an abort reports as in what a step does: the metrics add up differences."""
    monkeypatch.setattr(core, "kernels_compiled", lambda: 7)

    async def body(engine, listener):
        seen = []
        monkeypatch.setattr(listener, "on_step", lambda stats, tell=listener.on_step: (seen.append(stats), tell(stats)))
        stream = engine.generate(_prompt(engine), LONG, "a", delta=True)
        await anext(stream)
        await stream.aclose()
        await listener.until(lambda stats: stats.num_running == 0)
        assert [stats.kernel_compilations for stats in seen] == [7] * len(seen) and len(seen) >= 2
        metrics = Metrics("m")
        for stats in seen:
            metrics.on_step(stats)

    _run(tiny_core, _config(tiny_folder), body)


def test_cancelling_a_reader_ends_its_request(tiny_core, tiny_folder):
    async def body(engine, listener):
        reader = asyncio.create_task(_all(engine.generate(_prompt(engine), LONG, "a")))
        await listener.until(lambda stats: stats.num_running == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await listener.until(lambda stats: stats.num_running == 0)

    _run(tiny_core, _config(tiny_folder), body)


def test_an_abort_is_reported_as_an_abort(tiny_core, tiny_folder):
    async def body(engine, listener):
        stream = engine.generate(_prompt(engine), LONG, "a")
        reader = asyncio.create_task(_all(stream))
        await listener.until(lambda stats: stats.num_running == 1)
        await engine.abort("a")
        [output] = await reader
        assert output.finished and output.outputs[0].finish_reason == "abort"
        await engine.abort("a")  # it has ended: nothing happens

    _run(tiny_core, _config(tiny_folder), body)


def test_an_abort_during_the_last_step_is_an_abort(tiny_core, tiny_folder, monkeypatch):
    execute, computing, computed = tiny_core.runner.execute, threading.Event(), threading.Event()

    def execute_slowly(step):
        computing.set()
        assert computed.wait(30)
        return execute(step)

    monkeypatch.setattr(tiny_core.runner, "execute", execute_slowly)

    async def body(engine, listener):
        only_one = SamplingParams(temperature=0, max_tokens=1)
        reader = asyncio.create_task(_all(engine.generate(_prompt(engine), only_one, "a")))
        assert await asyncio.to_thread(computing.wait, 30)
        await engine.abort("a")
        computed.set()
        [output] = await reader
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        await listener.until(lambda stats: stats.num_running == 0 and stats.kv_cache_usage == 0)
        assert [finished.finish_reason for finished in listener.finished] == ["abort"]
        assert len(await _all(engine.generate(_prompt(engine), only_one, "a"))) == 1, "the id is free again"

    _run(tiny_core, _config(tiny_folder), body)


def test_an_id_may_be_used_again_during_the_last_step_of_the_old_request(tiny_core, tiny_folder, monkeypatch):
    step, held, go_on = tiny_core.step, threading.Event(), threading.Event()
    go_on.set()

    def step_and_wait():
        result = step()
        if not go_on.is_set():
            held.set()
            assert go_on.wait(30)
        return result

    monkeypatch.setattr(tiny_core, "step", step_and_wait)

    async def body(engine, listener):
        short = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        [expected] = await _all(engine.generate(_prompt(engine, 2), short, "alone"))
        old = engine.generate(_prompt(engine, 1), LONG, "a", delta=True)
        await anext(old)
        go_on.clear()
        assert await asyncio.to_thread(held.wait, 30)
        await old.aclose()
        new = engine.generate(_prompt(engine, 2), short, "a", delta=True)
        asyncio.get_running_loop().call_soon(go_on.set)  # after the new one was added
        outputs = [output.outputs[0] for output in await _all(new)]
        assert [token for output in outputs for token in output.token_ids] == expected.outputs[0].token_ids
        assert outputs[-1].finish_reason == "length"

    _run(tiny_core, _config(tiny_folder), body)


def test_bad_requests_do_not_touch_the_others(tiny_core, tiny_folder):
    async def body(engine, listener):
        good = asyncio.create_task(_all(engine.generate(_prompt(engine), LONG, "good")))
        with pytest.raises(RequestError, match="logit_bias"):
            await _all(engine.generate(_prompt(engine), SamplingParams(logit_bias={VOCAB_SIZE: 1}), "bad"))
        await listener.until(lambda stats: stats.num_running == 1)
        with pytest.raises(RequestError, match="in use"):
            await _all(engine.generate(_prompt(engine), LONG, "good"))
        [output] = await good
        assert len(output.outputs[0].token_ids) == 200

    _run(tiny_core, _config(tiny_folder), body)


def test_a_prompt_larger_than_the_pool_is_refused(tiny_folder):
    sizes = {"num_kv_blocks": 3, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    config = EngineConfig(tiny_folder, dtype="float32", skip_tokenizer_init=True, **sizes)

    async def body(engine, listener):
        with pytest.raises(RequestError, match="KV cache"):
            await _all(engine.generate(_prompt(engine, length=40), LONG, "a"))
        [output] = await _all(engine.generate(_prompt(engine, length=20), LONG, "a"))
        assert len(output.outputs[0].token_ids) == 13, "two blocks of 16, and the last token needs no slot"

    _run(EngineCore(config), config, body)


def test_a_failed_step_fails_every_request_and_later_ones(tiny_folder):
    config = _config(tiny_folder)
    core = EngineCore(config)

    async def body(engine, listener):
        readers = [asyncio.create_task(_all(engine.generate(_prompt(engine, s), LONG, str(s)))) for s in range(3)]
        await listener.until(lambda stats: stats.num_running == 3)
        core.runner.execute = None  # calling it fails
        for reader in readers:
            with pytest.raises(EngineDeadError, match="TypeError"):
                await reader
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await _all(engine.generate(_prompt(engine), LONG, "later"))

    async def main():
        listener = Listener()
        engine = AsyncEngine(config, core, listener)
        await engine.start()
        await body(engine, listener)
        await engine.shutdown(drain_seconds=0)

    asyncio.run(main())


def test_outputs_that_cannot_be_made_fail_every_request(tiny_core, tiny_folder, monkeypatch):
    async def body(engine, listener):
        readers = [asyncio.create_task(_all(engine.generate(_prompt(engine, s), LONG, str(s)))) for s in range(3)]
        await listener.until(lambda stats: stats.num_running == 3)
        monkeypatch.setattr(engine._processor, "process", None)  # calling it fails
        for reader in readers:
            with pytest.raises(EngineDeadError, match="TypeError"):
                await asyncio.wait_for(reader, 30)
        with pytest.raises(EngineDeadError):
            engine.check_health()
        await asyncio.to_thread(engine._thread.join, 30)
        assert not engine._thread.is_alive()
        tiny_core.abort_requests(list(tiny_core.scheduler.requests))

    _run(tiny_core, _config(tiny_folder), body)


@pytest.mark.parametrize("drain_seconds, finishes", [(60, True), (0, False)])
def test_shutdown_drains(tiny_core, tiny_folder, drain_seconds, finishes):
    async def main():
        listener = Listener()
        engine = AsyncEngine(_config(tiny_folder), tiny_core, listener)
        await engine.start()
        reader = asyncio.create_task(_all(engine.generate(_prompt(engine), LONG, "a")))
        await listener.until(lambda stats: stats.num_running == 1)
        await engine.shutdown(drain_seconds)
        if finishes:
            [output] = await reader
            assert len(output.outputs[0].token_ids) == 200
        else:
            with pytest.raises(EngineDeadError, match="shutting down"):
                await reader
        tiny_core.abort_requests(list(tiny_core.scheduler.requests))

    asyncio.run(main())
