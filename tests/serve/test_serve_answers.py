"""Shapes of answers and streams, as OpenAI's own client reads them."""

import json

import openai
import pytest
from running_server import run_server
from scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("<user>hi<assistant>") + 1  # and BOS


def chat(server, **fields):
    return server.openai.chat.completions.create(**({"model": "scripted", "messages": MESSAGES} | fields))


def complete(server, **fields):
    return server.openai.completions.create(**({"model": "scripted", "prompt": "hi"} | fields))


def read_events(server, route, **body):
    response = server.http.post(f"/v1/{route}", json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_chat(server):
    answer = chat(server)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world", "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, 12)
    assert usage.total_tokens == PROMPT_TOKENS + 12
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_answer_can_be_sent_back(server):
    first = chat(server).choices[0].message
    assert chat(server, messages=[*MESSAGES, first, *MESSAGES]).choices[0].message.content == "Hello, world"
    assert chat(server, messages=[*MESSAGES, first.model_dump(), *MESSAGES]).choices


def test_text_parts_and_developer_role(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    body = {"messages": messages, "return_token_strs": True}
    tokens = server.http.post("/tokenize", json=body).json()
    assert "".join(tokens["token_strs"][1:]) == "<system>be brief<user>ab<assistant>"


def test_limits_of_an_answer(server):
    assert chat(server, max_tokens=4).choices[0].message.content == "Hell"
    assert chat(server, max_completion_tokens=4).choices[0].finish_reason == "length"
    assert chat(server, max_completion_tokens=4, max_tokens=2).choices[0].message.content == "Hell"


def test_default_limits():
    with run_server(ScriptedEngine(answer="x" * 40)) as server:
        assert len(complete(server).choices[0].text) == 16
        assert len(chat(server).choices[0].message.content) == 40


def test_several_choices_come_in_order(server):
    answer = chat(server, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["Hello, world", "Hello, worl", "Hello, wor"]
    assert answer.usage.completion_tokens == 12 + 11 + 10


def test_every_prompt_of_a_list_has_its_choices(server):
    answer = complete(server, prompt=["one", [104, 105], "three"], n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [len(choice.text) for choice in answer.choices] == [12, 11] * 3
    assert answer.usage.prompt_tokens == 4 + 2 + 6
    assert answer.usage.completion_tokens == 23 * 3


def test_prompt_of_token_ids(server):
    assert complete(server, prompt=[1, 2, 3]).usage.prompt_tokens == 3
    assert complete(server, prompt=[[1, 2, 3], [4]]).usage.prompt_tokens == 4


def test_long_prompt_is_tokenised_beside_the_event_loop(server):
    assert complete(server, prompt="x" * 15_000).usage.prompt_tokens == 15_001


def test_chat_logprobs(server):
    content = chat(server, logprobs=True, top_logprobs=2, max_tokens=2).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["H", "e"]
    assert (content[0].logprob, content[0].bytes) == (-1.0, [ord("H")])
    assert [(entry.token, entry.logprob) for entry in content[0].top_logprobs] == [("!", -0.5), ("H", -1.0)]


def test_chat_logprobs_of_the_sampled_token_alone(server):
    [entry] = chat(server, logprobs=True, max_tokens=1).choices[0].logprobs.content
    assert (entry.token, entry.top_logprobs) == ("H", [])


def test_impossible_token_has_a_finite_logprob(server):
    [entry] = chat(server, logprobs=True, top_logprobs=3, max_tokens=1).choices[0].logprobs.content
    assert entry.top_logprobs[2].logprob == -9999.0


def test_completion_logprobs(server):
    logprobs = complete(server, logprobs=1, max_tokens=3).choices[0].logprobs
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-1.0] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [{token: -1.0, "!": -0.5} for token in "Hel"]


def test_completion_logprobs_of_the_sampled_token_alone(server):
    assert complete(server, logprobs=0, max_tokens=1).choices[0].logprobs.top_logprobs == [{"H": -1.0}]


def test_chat_stream(server):
    *events, last = read_events(server, "chat/completions", messages=MESSAGES)
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hello, world"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_stream_with_usage(server):
    for stream in (
        chat(server, stream=True, stream_options={"include_usage": True}),
        complete(server, prompt=["hi"] * 2, stream=True, stream_options={"include_usage": True}),
    ):
        *chunks, last = list(stream)
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage.completion_tokens in (12, 24)
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        assert last.usage.prompt_tokens_details.cached_tokens in (2, 4)


def test_stream_with_usage_says_null_before_the_end(server):
    options = {"stream_options": {"include_usage": True}}
    *events, _, _ = read_events(server, "chat/completions", messages=MESSAGES, **options)
    assert all(json.loads(event)["usage"] is None for event in events)


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_finished_choice_of_a_stream_is_not_sent_again(server, route):
    prompt = {"messages": MESSAGES} if route.startswith("chat") else {"prompt": "hi"}
    *events, _ = read_events(server, route, n=3, **prompt)
    texts, ended = {}, []
    for event in events:
        for choice in json.loads(event)["choices"]:
            assert choice["index"] not in ended
            text = choice["delta"]["content"] if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ended.append(choice["index"])
    assert texts == {0: "Hello, world", 1: "Hello, worl", 2: "Hello, wor"}
    assert ended == [2, 1, 0]


def test_completion_stream_of_several_prompts(server):
    texts = {}
    for chunk in complete(server, prompt=["a", "b"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "Hello, world", 1: "Hello, worl", 2: "Hello, world", 3: "Hello, worl"}


def test_stream_of_logprobs_joins_to_the_whole(server):
    whole = complete(server, logprobs=2, n=2)
    joined = {0: ([], []), 1: ([], [])}
    for chunk in complete(server, logprobs=2, n=2, stream=True):
        for choice in chunk.choices:
            joined[choice.index][0].extend(choice.logprobs.tokens)
            joined[choice.index][1].extend(choice.logprobs.text_offset)
    for choice in whole.choices:
        assert joined[choice.index] == (choice.logprobs.tokens, choice.logprobs.text_offset)
    deltas = [choice for chunk in chat(server, logprobs=True, stream=True) for choice in chunk.choices]
    tokens = [entry.token for choice in deltas if choice.logprobs for entry in choice.logprobs.content]
    assert "".join(tokens) == "Hello, world"


def test_error_after_a_stream_began_is_its_last_event(server):
    *events, last = read_events(server, "completions", prompt="fail")
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "Hel"
    assert json.loads(last)["error"] == {
        "message": "a step failed",
        "type": "server_error",
        "param": None,
        "code": "engine_dead",
    }
    with pytest.raises(openai.APIError, match="a step failed"):
        list(chat(server, messages=[{"role": "user", "content": "fail"}], stream=True))


def test_unexpected_error_is_logged_and_not_shown(caplog):
    with run_server(ScriptedEngine(failure=ZeroDivisionError("secret detail"))) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            complete(server, prompt="fail")
        assert caught.value.code == "internal_error"
        assert "secret" not in caught.value.message
        assert "secret detail" in caplog.text
        assert complete(server).choices


def test_dead_engine():
    engine = ScriptedEngine()
    with run_server(engine) as server:
        assert server.http.get("/health").status_code == 200
        engine.is_dead = True
        assert server.http.get("/health").status_code == 503
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                chat(server, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")


def test_models(server):
    assert [model.id for model in server.openai.models.list()] == ["scripted", "second-name"]
    model = server.openai.models.retrieve("second-name")
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "vllm_triton", 20_000)
    assert complete(server, model="second-name").model == "scripted"


def test_schema_names_the_fields(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"messages", "temperature"} <= schemas["ChatCompletionRequest"]["properties"].keys()


def test_tokenize_and_detokenize(server):
    body = server.http.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert body == {"count": 3, "max_model_len": 20_000, "tokens": [1, 104, 105], "token_strs": ["\x01", "h", "i"]}
    body = server.http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert (body["tokens"], body["token_strs"]) == ([104, 105], None)
    bare = server.http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["count"] == PROMPT_TOKENS - len("<assistant>")
    assert server.http.post("/detokenize", json={"tokens": [104, 105]}).json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("detokenize", {"tokens": [0x250]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_tokenize_and_detokenize_refuse_by_name(server, route, body, param):
    response = server.http.post(f"/{route}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
