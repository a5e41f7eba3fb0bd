"""Checkpoint: a model's configuration, tensors and tokenizer, whatever form they are stored in."""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vllm_triton.errors import ModelError
from vllm_triton.models.gguf_weight import GgufRows
from vllm_triton.tokenizer import Tokenizer

StoredTensor = torch.Tensor | GgufRows

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# The same weights once more, in a layout of the vendor's own.
_HUB_IGNORED = ["consolidated*", "original/*", "*/*.safetensors"]


class Checkpoint(ABC):
    """What the engine needs from a stored model.

    Attributes:
        source: where it was found: a folder, a file or a hub id.
        config: in the form of Hugging Face's config.json.
        generation_config: in the form of generation_config.json; {} if there is none.
        torch_dtype: type the weights were saved for, or None if the checkpoint does not say.
        packed_formats: the format of each weight that may stay packed, by name.
    """

    source: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    torch_dtype: torch.dtype | None
    packed_formats: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def tensors(self, packed: Container[str] = ()) -> Iterator[tuple[str, StoredTensor]]:
        """Yields (Hugging Face name, CPU tensor), one at a time.

        Args: packed: names of those that are to stay as they are.
        A tensor may be a view of the file: copy what has to outlive the next one.
        Raises: ModelError, naming the file or tensor that cannot be read.
        """

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """Raises: ModelError if there is no tokenizer, or one that is not supported."""


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a folder in Hugging Face's layout, a .gguf file, or a model of the Hugging Face hub.

    Args:
        model: path, or hub id `org/name`, whose files are fetched into the hub's cache.
    Raises: ModelError, naming the file or field that is missing or wrong.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path, str(path))
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such file: {path}")
        return _open_gguf(path)
    if path.exists():
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"no model at {model}: give a folder with config.json, a .gguf file, or a Hugging Face hub id org/name"
        )
    return _open_folder(_download(model), model)


def _open_folder(path: Path, source: str) -> Checkpoint:
    from vllm_triton.loading.folder import FolderCheckpoint

    return FolderCheckpoint(path, source)


def _open_gguf(path: Path) -> Checkpoint:
    from vllm_triton.loading.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def _download(hub_id: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
        )
    except Exception as error:  # The client raises its HTTP library's errors, the system's and its own.
        raise ModelError(
            f"no folder {hub_id} here, and the Hugging Face hub did not give {hub_id} "
            f"({type(error).__name__}: {error}). Check the name and the network (and HF_TOKEN for a gated model), "
            "or give a local folder or a .gguf file"
        ) from error
