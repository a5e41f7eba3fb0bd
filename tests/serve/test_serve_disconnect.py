"""A client that goes away ends its requests in the engine; so does a failing neighbour in a list of prompts."""

import socket

import httpx
import pytest
from running_server import run_server
from scripted_engine import ScriptedEngine


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def stalling_server(engine):
    with run_server(engine) as server:
        yield server
        engine.wait_for(lambda: not engine.running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 3])
@pytest.mark.parametrize(
    ("route", "body", "num_requests"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "stall"}], "n": 2}, 1),
        ("completions", {"prompt": "stall"}, 1),
        ("completions", {"prompt": ["stall", "stall too", "and stall"]}, 3),
    ],
)
def test_client_that_leaves_ends_its_requests(stalling_server, engine, route, body, num_requests, stream, stall_after):
    engine.stall_after = stall_after
    with httpx.Client() as client:
        request = client.build_request("POST", f"{stalling_server.url}/v1/{route}", json=body | {"stream": stream})
        if stream and stall_after:
            response = client.send(request, stream=True)
            lines = response.iter_lines()  # closes the response when it is dropped
            next(lines)
            engine.wait_for(lambda: len(engine.stalled) == num_requests)
            response.close()
        else:
            leave_when_stalled(engine, stalling_server, request, num_requests)
    engine.wait_for(lambda: not engine.running)
    assert httpx.post(f"{stalling_server.url}/v1/completions", json={"prompt": "hi"}).status_code == 200


def leave_when_stalled(engine, server, request, num_requests):
    """Sends a request that nobody answers over a bare socket, and closes that once the engine has it."""
    with socket.create_connection((request.url.host, request.url.port)) as connection:
        head = f"POST {request.url.path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(request.content)}\r\n\r\n".encode() + request.content)
        engine.wait_for(lambda: len(engine.stalled) == num_requests)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_aborts_the_others(stalling_server, engine, stream):
    body = {"prompt": ["stall", "fail", "stall"], "stream": stream}
    response = httpx.post(f"{stalling_server.url}/v1/completions", json=body, timeout=20)
    assert "engine_dead" in response.text
    engine.wait_for(lambda: not engine.running)


def test_refused_prompt_of_a_list_leaves_nothing_running(stalling_server, engine):
    response = httpx.post(f"{stalling_server.url}/v1/completions", json={"prompt": ["stall", "refuse"]}, timeout=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    engine.wait_for(lambda: not engine.running)
