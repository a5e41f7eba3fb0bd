"""A checkpoint in Hugging Face's layout: config.json and safetensors, whole or sharded."""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_triton.errors import ModelError
from vllm_triton.loading.checkpoint import Checkpoint
from vllm_triton.tokenizer import Tokenizer
from vllm_triton.tokenizer.folder import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


class FolderCheckpoint(Checkpoint):
    """A folder with config.json. Files are found and their headers read when it is opened, the tensors later."""

    def __init__(self, path: Path, source: str):
        self.path = path
        self.source = source
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json{_hint(path)}")
        self.config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self.torch_dtype = _torch_dtype(self.config, path)
        self._names_by_shard = _find_tensors(path)

    def tensors(self, packed: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for shard, names in self._names_by_shard.items():
            with _open_shard(shard) as file:
                for name in names:
                    try:
                        tensor = file.get_tensor(name)
                    except (SafetensorError, OSError) as error:
                        raise ModelError(f"tensor {name} of {shard} cannot be read: {error}") from error
                    yield name, tensor

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)


def _torch_dtype(config: dict[str, Any], path: Path) -> torch.dtype | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"{path / 'config.json'}: torch_dtype {name!r} is not a torch dtype such as bfloat16")
    return dtype


def _find_tensors(path: Path) -> dict[Path, list[str]]:
    """Shard -> the tensors to take from it; every shard exists and holds them."""
    wanted = _read_index(path) if (path / INDEX_NAME).is_file() else dict.fromkeys(_shards_without_index(path))
    found = {}
    for shard, names in wanted.items():
        with _open_shard(shard) as file:
            held = list(file.keys())
        missing = sorted(set(names or []) - set(held))
        if missing:
            raise ModelError(f"{shard} lacks the tensor {missing[0]}, which {path / INDEX_NAME} places there")
        found[shard] = names or held
    return found


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    index = path / INDEX_NAME
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map from tensor names to files")
    if not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    names_by_shard: dict[Path, list[str] | None] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise ModelError(f"{index} names {file_name!r}, which is not a file of the same folder")
        if not (path / file_name).is_file():
            raise ModelError(f"{path / file_name} is missing: {index.name} names it; fetch the model's files again")
        names_by_shard[path / file_name] = [name for name, place in weight_map.items() if place == file_name]
    return names_by_shard


def _shards_without_index(path: Path) -> list[Path]:
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME]
    shards = sorted(
        file for file in path.glob("*.safetensors") if not file.name.startswith(("consolidated", "adapter_"))
    )
    if not shards:
        raise ModelError(f"{path} has no *.safetensors weights{_hint(path)}")
    for shard in shards:
        if match := _SHARD_PATTERN.fullmatch(shard.name):
            stem, _, count = match.groups()
            for number in range(1, int(count) + 1):
                expected = path / f"{stem}-{number:05}-of-{count}.safetensors"
                if not expected.is_file():
                    raise ModelError(f"{expected} is missing: {shard.name} says there are {int(count)} shards")
    return shards


def _open_shard(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{shard} is truncated or not a safetensors file ({error}); fetch the file again") from error


def _hint(path: Path) -> str:
    if gguf_files := sorted(path.glob("*.gguf")):
        return f"; give the GGUF file itself: {gguf_files[0]}"
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        return (
            "; its PyTorch pickle files are not read because they can run code: "
            "save the model as safetensors (transformers: save_pretrained)"
        )
    if any(path.glob("adapter_*.safetensors")):
        return "; it holds an adapter: merge it into its base model and give the result"
    return "; give a folder in Hugging Face's layout (config.json, *.safetensors, tokenizer.json)"
