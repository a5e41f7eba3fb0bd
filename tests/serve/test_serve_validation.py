"""Every wrong value is a 400 that names its field, and the server goes on."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_server import run_server
from scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE, ScriptedEngine

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES}
COMPLETION = {"prompt": "hi"}

BAD_IN_BOTH = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 10**309),
    ("min_tokens", 10**309),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("n", "\ud800"),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", float("inf")),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-46),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {}),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", ["1"]),
    ("bad_words", "text"),
    ("bad_words", [""]),
    ("ignore_eos", 1),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", []),
    ("user", 5),
    ("metadata", "a"),
    ("model", 5),
    ("temprature", 1),
    ("\ud800", 1),
]
BAD_IN_CHAT = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("messages", [MESSAGES]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"content": "hi"}]),
    ("messages", [{"role": "robot", "content": "hi"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": "hi", "nmae": "x"}]),
    ("messages", [{"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}]),
    ("messages", [{"role": "user", "content": "x" * MAX_MODEL_LEN}]),
    ("max_completion_tokens", 0),
    ("logprobs", 5),
    ("top_logprobs", 3),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("function_call", {"name": "f"}),
    ("response_format", {"type": "json_object"}),
    ("response_format", "text"),
    ("modalities", ["text", "audio"]),
    ("audio", {}),
    ("parallel_tool_calls", "no"),
    ("prompt", "hi"),
]
BAD_IN_COMPLETIONS = [
    ("prompt", []),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [[]]),
    ("prompt", [[[1]]]),
    ("prompt", [VOCAB_SIZE]),
    ("prompt", ["fine", [VOCAB_SIZE]]),
    ("prompt", [0] * MAX_MODEL_LEN),
    ("prompt", ["fine", "refuse"]),
    ("logprobs", True),
    ("logprobs", -1),
    ("logprobs", 21),
    ("echo", True),
    ("echo", 0),
    ("suffix", "end"),
    ("best_of", 2),
    ("messages", MESSAGES),
]
CASES = [
    *(("chat/completions", CHAT, *case) for case in BAD_IN_BOTH + BAD_IN_CHAT),
    *(("completions", COMPLETION, *case) for case in BAD_IN_BOTH + BAD_IN_COMPLETIONS),
]


def name_case(value):
    return ascii(value)[:40] if not isinstance(value, dict | list) else None


def post(server, route, body):
    # The client would refuse what JSON cannot hold; Python's json writes Infinity, NaN and half surrogates.
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return server.http.post(route, content=content, headers=headers)


def assert_refused(response, status, param):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(("route", "body", "name", "value"), CASES, ids=name_case)
def test_wrong_value_is_refused_by_name(server, route, body, name, value):
    # What no client can send as it is comes back with its half surrogate replaced.
    shown = name.encode("utf-8", "replace").decode()
    assert_refused(post(server, f"v1/{route}", body | {name: value}), 400, shown)
    assert post(server, f"v1/{route}", body).status_code == 200


def test_top_logprobs_out_of_range(server):
    assert_refused(
        post(server, "v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}), 400, "top_logprobs"
    )


def test_min_tokens_above_max_tokens(server):
    for body in (COMPLETION | {"min_tokens": 17}, COMPLETION | {"min_tokens": 5, "max_tokens": 4}):
        assert_refused(post(server, "v1/completions", body), 400, "min_tokens")


def test_too_many_sequences_in_one_request(server):
    body = COMPLETION | {"prompt": ["a"] * 1025, "n": 2}
    assert_refused(post(server, "v1/completions", body), 400, "prompt")


def test_unknown_field_lists_the_fields_there_are(server):
    message = post(server, "v1/chat/completions", CHAT | {"temprature": 1}).json()["error"]["message"]
    assert "temprature" in message and "temperature" in message


NEUTRAL = {
    "temperature": None,
    "n": None,
    "stop": None,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
}
NEUTRAL_IN_CHAT = {
    "tools": [],
    "tool_choice": "none",
    "functions": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "parallel_tool_calls": True,
    "logprobs": False,
}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", CHAT | NEUTRAL | NEUTRAL_IN_CHAT),
        ("completions", COMPLETION | NEUTRAL | {"echo": False, "suffix": "", "best_of": 1, "logprobs": None}),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(server, route, body):
    plain, neutral = (post(server, f"v1/{route}", sent).json() for sent in ({**body, **NEUTRAL}, body))
    assert plain["choices"] == neutral["choices"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CHAT_FIELDS = sorted({name for name, _ in BAD_IN_BOTH + BAD_IN_CHAT} - {"\ud800"})


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(CHAT_FIELDS), json_values, min_size=1, max_size=3))
def test_any_value_is_answered_or_refused_by_name(server, fields):
    response = post(server, "v1/chat/completions", CHAT | fields)
    if response.status_code == 404:
        assert_refused(response, 404, "model")
    elif response.status_code != 200:
        assert_refused(response, 400, response.json()["error"]["param"])
        assert response.json()["error"]["param"] in fields


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}"])
def test_bad_json(server, content):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"text"'])
def test_json_that_is_no_object(server, content):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert "JSON object" in response.json()["error"]["message"]


def test_unknown_model(server):
    for call in (
        lambda: server.openai.chat.completions.create(model="other", messages=MESSAGES),
        lambda: server.openai.completions.create(model="other", prompt="hi"),
        lambda: server.openai.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_unknown_address_and_method(server):
    assert_refused(server.http.get("/v1/nothing"), 404, None)
    assert_refused(server.http.get("/v1/completions"), 405, None)


def test_refusal_reaches_the_client_as_its_own_error(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="scripted", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "refuse"}], stream=True
        )
    assert caught.value.param == "messages"


def test_api_key():
    with run_server(ScriptedEngine(), api_key="secret") as server:
        for route in ("/v1/models", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                assert_refused(server.http.post(route, json=CHAT, headers=header), 401, None)
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai.models.list()
        assert caught.value.code == "invalid_api_key"
        assert server.openai.with_options(api_key="secret").models.list().data[0].id == "scripted"
        for route in ("/health", "/version", "/metrics", "/"):
            assert server.http.get(route).status_code == 200
