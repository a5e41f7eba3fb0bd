"""Flags: what reaches the engine, and one clear line for what is wrong."""

import shlex
import socket
import subprocess
import sys

import pytest

from vllm_triton.serve.arguments import parse_arguments
from vllm_triton.serve.launcher import _ready_message, bind


def run_server_command(*flags):
    command = [sys.executable, "-m", "vllm_triton.serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def assert_one_line(text):
    assert text.endswith("\n") and text.count("\n") == 1, text


def test_only_given_flags_reach_the_engine():
    arguments = parse_arguments([])
    assert (arguments.host, arguments.port, arguments.engine) == ("127.0.0.1", 8000, {})
    assert (arguments.api_key, arguments.served_model_names) == (None, None)


def test_every_flag():
    text = (
        "--host 0.0.0.0 --port 0 --api-key k --served-model-name a b --model m --dtype float32 --max-model-len 64"
        " --num-kv-blocks 9 --block-size 8 --max-num-seqs 4 --max-num-batched-tokens 32 --load-format dummy --seed 3"
        " --no-enable-prefix-caching --kernels rms_norm=torch,linear=triton -O1"
    )
    arguments = parse_arguments(text.split())
    assert (arguments.host, arguments.port, arguments.api_key) == ("0.0.0.0", 0, "k")
    assert arguments.served_model_names == ["a", "b"]
    assert arguments.engine == {
        "model": "m",
        "dtype": "float32",
        "max_model_len": 64,
        "num_kv_blocks": 9,
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "seed": 3,
        "kernels": {"rms_norm": "torch", "linear": "triton"},
        "optimization_level": 1,
        "load_format": "dummy",
    }


@pytest.mark.parametrize("flags", ["-O2", "-O 2", "--optimization-level 2"])
def test_spellings_of_the_optimization_level(flags):
    assert parse_arguments(flags.split()).engine == {"optimization_level": 2}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prot 80", ["--prot", "--port"]),
        ("--port 65536", ["--port", "65536"]),
        ("--port x", ["--port", "'x'"]),
        ("-O4", ["-O", "4"]),
        ("--max-model-len 0", ["--max-model-len", "'0'"]),
        ("--block-size 1.5", ["--block-size", "'1.5'"]),
        ("--seed x", ["--seed", "'x'"]),
        ("--kernels rms_norm", ["--kernels", "OP=IMPL", "'rms_norm'"]),
        ("--kernels a=b,a=c", ["--kernels", "'a=b,a=c'"]),
        ("--kernels =b", ["--kernels", "'=b'"]),
        ("--mod x", ["--mod"]),
    ],
)
def test_wrong_flag_is_one_line(capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(flags.split())
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert_one_line(message)
    assert all(word in message for word in words)


def test_help_loads_nothing_heavy():
    code = "import sys; from vllm_triton.serve.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'triton', 'fastapi', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    assert "--served-model-name" in done.stdout


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_server_command("--port", port)
    assert done.returncode == 1
    assert_one_line(done.stderr)
    assert port in done.stderr and "--port" in done.stderr


def test_bad_model_path():
    done = run_server_command("--port", "0", "--model", "/no/such/model.gguf")
    assert done.returncode == 1
    assert_one_line(done.stderr)
    assert "/no/such/model.gguf" in done.stderr


def test_value_that_the_engine_refuses():
    done = run_server_command("--port", "0", "--model", "any", "--block-size", "3")
    assert done.returncode == 1
    assert_one_line(done.stderr)
    assert "block_size" in done.stderr


def test_unknown_kernel():
    done = run_server_command("--port", "0", "--kernels", "rms_norm=nobodys")
    assert done.returncode == 1
    assert_one_line(done.stderr)
    assert "rms_norm" in done.stderr and "nobodys" in done.stderr


def test_an_api_key_that_no_client_could_send(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--api-key", "k\udcff"])
    assert "must be valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_acknowledgements(host):
    """asyncio sets TCP_NODELAY only on connections of a listener that names its protocol."""
    try:
        listener = bind(host, 0)
    except OSError as error:
        pytest.skip(str(error))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_host_that_does_not_exist():
    with pytest.raises(OSError, match=r"no-such-host.invalid.*--host"):
        bind("no-such-host.invalid", 0)


def test_ready_message_quotes_what_a_shell_would_read():
    command = _ready_message("http://h:1", "it's $HOME", "k'ey").splitlines()[1]
    words = shlex.split(command)
    assert words[:3] == ["curl", "-s", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer k'ey" in words
    assert '"model": "it\'s $HOME"' in words[-1]
