"""The server over the real engine in this process, with a tiny model whose tokenizer puts a BOS before every text."""

import socket
import threading

import httpx
import openai
import pytest
from running_server import run_server
from tiny import make_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from vllm_triton import LLM, SamplingParams
from vllm_triton.config import EngineConfig
from vllm_triton.engine.async_engine import AsyncEngine
from vllm_triton.engine.core import EngineCore
from vllm_triton.engine.messages import SchedulerStats
from vllm_triton.serve.metrics import Metrics

BOS = 1
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
# Natively, kernels compile for steps of every size up to the largest.
SIZES = {"num_kv_blocks": 11, "max_num_seqs": 4, "max_num_batched_tokens": 128}
# Fits the context of 256 tokens, but not the ten blocks of 16.
TOO_LONG = "x" * 200
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
BODIES = {
    "chat/completions": {"messages": MESSAGES, "n": 2},
    "completions": {"prompt": ["hello", "another"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tiny-text")
    make_tiny("llama3", path)
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


class Gate:
    """Around the core: keeps the prompts, and lets through `num_steps` more steps (None for all) while it is closed."""

    def __init__(self, core: EngineCore):
        self.prompts, self.num_steps, self.num_done = [], None, 0
        self.opened = threading.Event()
        self._add_request, self._step = core.add_request, core.step
        core.add_request, core.step = self.add_request, self.step

    def add_request(self, request):
        self._add_request(request)
        self.prompts.append(request.prompt_token_ids)

    def step(self):
        if self.num_steps == 0:
            assert self.opened.wait(30)
        elif self.num_steps is not None:
            self.num_steps -= 1
        self.num_done += 1
        return self._step()

    def close_after(self, num_steps: int):
        self.opened.clear()
        self.num_steps = num_steps

    def open(self):
        self.num_steps = None
        self.opened.set()


class Reports(Metrics):
    """Also lets the test wait for what the engine reports."""

    def __init__(self):
        super().__init__("tiny")
        self.reasons, self.stats, self.changed = [], SchedulerStats(), threading.Condition()

    def on_step(self, stats):
        super().on_step(stats)
        with self.changed:
            self.stats = stats
            self.changed.notify_all()

    def on_finished(self, stats):
        super().on_finished(stats)
        with self.changed:
            self.reasons.append(stats.finish_reason)
            self.changed.notify_all()

    def wait_for(self, predicate):
        with self.changed:
            assert self.changed.wait_for(predicate, 20), (self.reasons, self.stats)

    def wait_until_idle(self):
        self.wait_for(lambda: self.stats.num_running == self.stats.num_waiting == self.stats.kv_cache_usage == 0)


@pytest.fixture(scope="module")
def tiny(folder):
    """A running server, its gate, and what it reported."""
    config = EngineConfig(folder, dtype="float32", **SIZES)
    core = EngineCore(config)
    gate, reports = Gate(core), Reports()
    with run_server(AsyncEngine(config, core, reports)) as server:
        yield server, gate, reports
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
def test_served_and_offline_chats_have_the_same_prompt(tiny, folder, stream):
    server, gate, _ = tiny
    llm = LLM(folder, dtype="float32", **SIZES)
    [offline] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    expected = [BOS, *llm.tokenizer.encode("[system]be brief[user]hello[assistant]", add_special_tokens=False)]
    assert offline.prompt_token_ids == expected
    gate.prompts.clear()
    answer = server.openai.chat.completions.create(
        model="scripted", messages=MESSAGES, temperature=0, max_tokens=3, stream=stream
    )
    assert list(answer)
    assert gate.prompts == [expected]
    shown = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert shown == expected and shown.count(BOS) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}], "n": 2}, "messages"),
        ("completions", {"prompt": TOO_LONG}, "prompt"),
        ("completions", {"prompt": ["fits", TOO_LONG]}, "prompt"),
    ],
)
def test_a_prompt_that_the_pool_cannot_hold_is_refused(tiny, route, body, param, stream):
    server, _, reports = tiny
    response = server.http.post(f"/v1/{route}", json=body | {"stream": stream, "max_tokens": 20})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "the KV cache holds 160" in error["message"]
    reports.wait_until_idle()
    assert server.openai.completions.create(model="scripted", prompt="fits", max_tokens=2).usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_client_that_leaves_frees_its_blocks(tiny, route, stream):
    server, gate, reports = tiny
    reports.reasons.clear()
    # In the middle of the answer the engine stands still until the client has gone, so that nothing ends by itself.
    gate.close_after(5)
    try:
        request = httpx.Request("POST", f"{server.url}/v1/{route}", json=BODIES[route] | LONG | {"stream": stream})
        with socket.create_connection((request.url.host, request.url.port)) as connection:
            head = f"POST {request.url.path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(request.content)}\r\n\r\n".encode() + request.content)
            reports.wait_for(lambda: reports.stats.num_running == 2 and reports.stats.kv_cache_usage > 0)
            assert not stream or b"200 OK" in connection.recv(100)
        num_requests = 1 if "n" in BODIES[route] else 2
        reports.wait_for(lambda: reports.reasons == ["abort"] * num_requests)
        num_done = gate.num_done
    finally:
        gate.open()
    reports.wait_until_idle()
    assert len(reports.reasons) == num_requests
    assert gate.num_done <= num_done + 1, "the step under way is the last"


def test_choices_come_in_order_and_end_once(tiny):
    server, _, _ = tiny
    settings = {"model": "scripted", "prompt": "hello", "max_tokens": 12, "temperature": 1.5, "seed": 1, "n": 3}
    settings |= {"stop": list("aeiou"), "extra_body": {"ignore_eos": True}}
    whole = server.openai.completions.create(**settings).choices
    assert [choice.index for choice in whole] == [0, 1, 2]
    texts, reasons = {}, {}
    for chunk in server.openai.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole}
    assert reasons == {choice.index: choice.finish_reason for choice in whole}


@pytest.mark.parametrize("field", [{"logit_bias": {"199": 1}}, {"stop_token_ids": [199]}])
def test_token_ids_beyond_the_vocabulary_are_refused(tiny, field):
    server, _, _ = tiny
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="scripted", prompt="hello", extra_body=field)
    assert [caught.value.param] == list(field)
    last = {name: {"198": 1} if name == "logit_bias" else [198] for name in field}
    assert server.openai.completions.create(model="scripted", prompt="hello", extra_body=last).choices
