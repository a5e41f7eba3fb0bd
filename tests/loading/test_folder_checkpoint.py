"""Folders in Hugging Face's layout, and how a model's name is understood."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from vllm_triton.errors import ModelError
from vllm_triton.loading import Checkpoint, open_checkpoint

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}
FIRST = {"model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}
SECOND = {"lm_head.weight": torch.full((4, 3), 2.0, dtype=torch.bfloat16)}
NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_shards(folder, index=True):
    for name, tensors in zip(NAMES, (FIRST, SECOND), strict=True):
        save_file(tensors, folder / name)
    if index:
        weight_map = dict.fromkeys(FIRST, NAMES[0]) | dict.fromkeys(SECOND, NAMES[1])
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_tensors(checkpoint, expected):
    read = dict(checkpoint.tensors())
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_single_file(folder):
    save_file(FIRST, folder / "model.safetensors")
    # The vendor's own copy of the weights must not be read a second time.
    save_file(SECOND, folder / "consolidated.safetensors")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(folder))
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.source == str(folder)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.torch_dtype is torch.bfloat16
    assert_tensors(checkpoint, FIRST)


@pytest.mark.parametrize("index", [True, False])
def test_shards(folder, index):
    write_shards(folder, index)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config == {}
    assert_tensors(checkpoint, FIRST | SECOND)


def test_files_outside_the_index_are_not_read(folder):
    write_shards(folder)
    save_file({"extra.weight": torch.ones(1)}, folder / "extra.safetensors")
    assert_tensors(open_checkpoint(folder), FIRST | SECOND)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "auto"}, None),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
    ],
)
def test_dtype(folder, config, dtype):
    save_file(FIRST, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).torch_dtype is dtype


@pytest.mark.parametrize("name", ["float99", "nn", 3])
def test_unknown_dtype(folder, name):
    save_file(FIRST, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"torch_dtype": name}))
    with pytest.raises(ModelError, match=f"torch_dtype.*{name}.*bfloat16"):
        open_checkpoint(folder)


def test_missing_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("{oops", "cannot be read as JSON"), ("[]", "must hold a JSON object")]
)
def test_invalid_config(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json {message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("other_file", "hint"),
    [
        ("readme.txt", "give a folder in Hugging Face's layout"),
        ("pytorch_model.bin", "save the model as safetensors"),
        ("small.gguf", r"give the GGUF file itself: .*small\.gguf"),
        ("adapter_model.safetensors", "merge it into its base model"),
    ],
)
def test_no_safetensors_says_what_to_do(folder, other_file, hint):
    (folder / other_file).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"has no \*\.safetensors weights; .*{hint}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("missing", NAMES)
def test_missing_shard(folder, index, missing):
    write_shards(folder, index)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=f"{missing} is missing"):
        open_checkpoint(folder)


def test_tensor_missing_from_its_shard(folder):
    write_shards(folder)
    save_file({"other": torch.ones(1)}, folder / NAMES[1])
    with pytest.raises(ModelError, match=rf"{NAMES[1]} lacks the tensor lm_head\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "must map tensor names to file names"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "not a file of the same folder"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_invalid_index(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json.*{message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_truncated_file(folder, kept):
    save_file(FIRST, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        open_checkpoint(folder)


def test_tokenizer_of_the_folder(folder):
    save_file(FIRST, folder / "model.safetensors")
    Backend(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    assert open_checkpoint(folder).load_tokenizer().encode("a") == [0]


def test_names_that_are_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match="neither a folder nor a"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    for name in ("just-a-name", "a/b/c", tmp_path / "absent"):
        with pytest.raises(
            ModelError, match=r"give a folder with config\.json, a \.gguf file, or a .* hub id org/name"
        ):
            open_checkpoint(name)


def test_hub_download(folder, monkeypatch):
    import huggingface_hub

    save_file(FIRST, folder / "model.safetensors")
    asked = []

    def download(hub_id, allow_patterns, ignore_patterns):
        asked.append(hub_id)
        assert "*.safetensors" in allow_patterns
        assert not any(pattern.endswith((".bin", ".pt", ".pth", ".gguf")) for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("org/name-1.5")
    assert asked == ["org/name-1.5"]
    assert checkpoint.source == "org/name-1.5"
    assert_tensors(checkpoint, FIRST)


def test_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"did not give no-such-org/no-such-model.*name and the network.*\.gguf"):
        open_checkpoint("no-such-org/no-such-model")


def test_import_does_not_load_transformers():
    code = (
        "import sys; from vllm_triton.loading import find_demo_model, open_checkpoint; "
        "open_checkpoint(find_demo_model()).load_tokenizer().encode('text'); "
        "print([name for name in ('transformers', 'fastapi', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
