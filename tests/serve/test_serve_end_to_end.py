"""The whole server with a real model, as its own process."""

import concurrent.futures
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

import vllm_triton
from vllm_triton.errors import ModelError
from vllm_triton.loading import find_demo_model

FLAGS = ["--port", "0", "--max-model-len", "1024", "--num-kv-blocks", "300", "--dtype", "float32", "-O0"]
MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


class ServerProcess:
    def __init__(self, *flags):
        command = [sys.executable, "-m", "vllm_triton.serve", *FLAGS, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready_line = self.process.stdout.readline()
        if not self.ready_line:
            raise AssertionError(self.process.stderr.read())
        self.curl_line = self.process.stdout.readline()
        self.url = re.search(r"http://[\d.:]+", self.ready_line).group(0)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)
        self.model = self.openai.models.list().data[0].id

    def metric(self, name, label=""):
        line = re.search(rf"^vllm:{name}{{.*{label}.*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert line, f"no metric {name}"
        return float(line.group(1))

    @property
    def num_aborted(self):
        return self.metric("request_success_total", 'finished_reason="abort"')

    def wait_until(self, predicate, seconds=20):
        """Asks again until it holds; every question is an HTTP call, which paces the loop."""
        end = time.monotonic() + seconds
        while not predicate():
            assert time.monotonic() < end, "it did not come true in time"

    def stop(self, sig=signal.SIGINT):
        """Returns (exit status, seconds it took)."""
        start = time.monotonic()
        self.process.send_signal(sig)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, time.monotonic() - start


def start_server(*flags):
    try:
        find_demo_model()
    except ModelError as error:
        pytest.skip(str(error))
    return ServerProcess(*flags)


@pytest.fixture(scope="module")
def real():
    server = start_server()
    yield server
    status, _ = server.stop()
    assert status == 0, server.process.stderr.read()


def ask(server, **fields):
    settings = {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return server.openai.chat.completions.create(**(settings | fields))


def test_printed_command_works_as_pasted(real):
    command = shlex.split(real.curl_line)
    assert command[0] == "curl"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert '"object":"chat.completion"' in done.stdout.replace(": ", ":")


def test_stream_joins_to_the_whole_answer(real):
    whole = ask(real)
    *chunks, last = list(ask(real, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.choices[0].message.content
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert last.usage.prompt_tokens_details.cached_tokens >= 16


def test_several_seeded_choices_are_reproducible(real):
    first, second = (ask(real, n=2, temperature=1.0, seed=5) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]


def test_logprobs(real):
    content = ask(real, logprobs=True, top_logprobs=2, max_tokens=3).choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token
        assert 0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    logprobs = (
        real.openai.completions.create(model=real.model, prompt="The", logprobs=0, max_tokens=3).choices[0].logprobs
    )
    assert [len(top) for top in logprobs.top_logprobs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"logit_bias": {"49152": 1}}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [49152]}}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}], "stream": True}, None),
        ({"temperature": -1, "stream": True}, "temperature"),
    ],
)
def test_refused_requests_leave_the_engine_alive(real, fields, param):
    if param is None:
        # The client cannot write a half surrogate; as an escape in JSON text it is possible.
        body = '{"messages": [{"role": "user", "content": "\\ud800"}], "stream": true}'
        headers = {"Content-Type": "application/json"}
        response = real.http.post("/v1/chat/completions", content=body, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(real, **fields)
        assert caught.value.param == param
    assert ask(real, max_tokens=1).choices


def test_prompt_id_outside_the_vocabulary(real):
    with pytest.raises(openai.BadRequestError) as caught:
        real.openai.completions.create(model=real.model, prompt=[[1, 2], [49152]])
    assert caught.value.param == "prompt"


def test_tokens_survive_the_round_trip(real):
    text = "Hello, wörld 123"
    tokens = real.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert real.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_client_that_leaves_a_stream(real):
    before = real.num_aborted
    with real.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        real.wait_until(lambda: real.metric("num_requests_running") == 1)
    real.wait_until(lambda: real.metric("num_requests_running") == 0)
    assert real.metric("kv_cache_usage_perc") == 0
    assert real.num_aborted == before + 1, "it did not end by itself"


def test_client_that_leaves_a_plain_request(real):
    before = real.num_aborted
    with httpx.Client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        pending = pool.submit(client.post, f"{real.url}/v1/completions", json=LONG | {"n": 2}, timeout=1.5)
        with pytest.raises(httpx.ReadTimeout):
            pending.result()
    real.wait_until(lambda: real.metric("num_requests_running") == 0)
    assert real.metric("kv_cache_usage_perc") == 0
    assert real.num_aborted == before + 1, "it did not end by itself"


def test_metrics_of_a_request(real):
    before = {name: real.metric(name) for name in ("generation_tokens_total", "request_params_n_count")}
    ask(real, max_tokens=7, n=2, extra_body={"ignore_eos": True})
    assert real.metric("generation_tokens_total") == before["generation_tokens_total"] + 14
    assert real.metric("request_params_n_count") == before["request_params_n_count"] + 1
    assert real.metric("prefix_cache_queries_total") >= real.metric("prefix_cache_hits_total") > 0
    assert real.metric("time_to_first_token_seconds_count") > 0
    assert real.metric("inter_token_latency_seconds_count") > 0
    assert real.metric("num_requests_waiting") == 0


def test_version_and_health(real):
    assert real.http.get("/version").json() == {"version": vllm_triton.__version__}
    assert real.http.get("/health").status_code == 200


def test_signal_ends_a_stream_cleanly_within_five_seconds():
    server = start_server("--served-model-name", "short", "other")
    assert server.model == "short"
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "model": "other"}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        status, seconds = server.stop(signal.SIGTERM)
        *_, last = [line for line in lines if line]
    assert status == 0
    assert "Traceback" not in server.process.stderr.read()
    assert seconds < 5
    assert last == "data: [DONE]" or "shutting down" in last


def test_second_signal_ends_the_server_at_once():
    server = start_server()
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        server.wait_until(lambda: not is_listening(server.url), seconds=2)
        status, seconds = server.stop(signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert seconds < 1


def is_listening(url):
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True
