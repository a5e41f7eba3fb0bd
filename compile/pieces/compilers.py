"""What makes a piece run: the ops' own kernels, one call each, or code that torch's inductor writes for all of it."""

import hashlib
import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from vllm_triton.compile.pieces.ranges import CompileRange
from vllm_triton.compile.pieces.source import TOKENS, Dim, Function, TensorSpec
from vllm_triton.compile.pieces.trace import Sizes
from vllm_triton.ops.registry import OPS

Runnable = Callable[..., tuple[torch.Tensor, ...]]  # (T, *inputs, *constants)
Save = Callable[[Path], str]  # writes into a folder and returns a handle for `load`: a file's name, or ""


class PieceCompiler(Protocol):
    """Of the command line's --compile-backend.

    Attributes:
        name: by which it is chosen.
        launches_only: what it makes of a piece whose ops launch Triton kernels does nothing else, so that a CPU can
            capture it.
    """

    name: str
    launches_only: bool

    def key(self) -> dict[str, Any]:
        """What shapes its results beside the pieces themselves."""
        ...

    def compile(self, piece: Function, sizes: CompileRange) -> tuple[Runnable, Save]:
        """The piece for so many tokens, and what keeps it for other processes."""
        ...

    def load(self, piece: Function, handle: str, folder: Path) -> Runnable:
        """What compile returned, from what was saved. Raises: any exception where the file cannot be used."""
        ...


class EagerCompiler:
    """Calls one op after the other: each is its own kernel."""

    name = "eager"
    launches_only = True

    def key(self) -> dict[str, Any]:
        return {}

    def compile(self, piece: Function, sizes: CompileRange) -> tuple[Runnable, Save]:
        return self._define(piece), lambda folder: ""  # the piece's text is all there is

    def load(self, piece: Function, handle: str, folder: Path) -> Runnable:
        return self._define(piece)

    def _define(self, piece: Function) -> Runnable:
        return define(piece.name, piece.text, chosen_implementations())


class InductorCompiler:
    """torch's inductor fuses what lies between the opaque ops; inlineable ops are what their references compute."""

    name = "inductor"
    launches_only = False

    def key(self) -> dict[str, Any]:
        from torch._inductor import config
        from torch._inductor.codecache import CacheBase

        # Loops over threads are written for so many.
        settings = hashlib.sha256(config.save_config()).hexdigest()
        return {"system": CacheBase.get_system()["hash"], "settings": settings, "threads": torch.get_num_threads()}

    def compile(self, piece: Function, sizes: CompileRange) -> tuple[Runnable, Save]:
        from torch._inductor import standalone_compile

        module, examples = _traced(piece, sizes)
        artifact = standalone_compile(module, examples, dynamic_shapes="from_graph")

        def save(folder: Path) -> str:
            handle = f"{piece.name}.{sizes}.inductor"
            artifact.save(path=str(folder / handle), format="binary")
            return handle

        return _without_tokens(artifact), save

    def load(self, piece: Function, handle: str, folder: Path) -> Runnable:
        from torch._inductor import CompiledArtifact

        return _without_tokens(CompiledArtifact.load(path=str(folder / handle), format="binary"))


COMPILERS: Mapping[str, Callable[[], PieceCompiler]] = {"eager": EagerCompiler, "inductor": InductorCompiler}


def chosen_implementations() -> dict[str, Callable[..., Any]]:
    """Of every op, the function that runs now; calling it checks nothing."""
    return {name: op.implementation_now().function for name, op in OPS.items()}


def define(name: str, text: str, ops: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that a text defines, with these functions for its ops."""
    scope: dict[str, Any] = {"ops": SimpleNamespace(**ops), "aten": torch.ops.aten, "torch": torch}
    file = f"<{name} {hash(text):x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # tracebacks show its lines
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def _without_tokens(artifact: Callable[..., Any]) -> Runnable:
    """Compiled code finds the number of tokens in its tensors."""
    return lambda num_tokens, *tensors: tuple(artifact(*tensors))


def _traced(piece: Function, sizes: CompileRange) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The piece as torch calls and opaque ops, and tensors without values that it takes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    is_exact = sizes.start == sizes.end
    tokens = sizes.end if is_exact else Sizes(mode.shape_env).within(TOKENS, sizes.start, sizes.end)
    with mode:
        examples = [_example(spec, tokens) for spec in piece.parameters]
    ops = {name: op.reference if op.contract.inlineable else op.torch_op for name, op in OPS.items()}
    function = define(piece.name, piece.text, ops)
    with torch.no_grad():
        return make_fx(lambda *tensors: function(tokens, *tensors))(*examples), examples


def _example(spec: TensorSpec, tokens: Any) -> torch.Tensor:
    def size(dim: Dim) -> Any:
        return eval(dim, {TOKENS: tokens}) if isinstance(dim, str) else dim

    return torch.empty_strided(
        [size(dim) for dim in spec.shape],
        [size(dim) for dim in spec.strides],
        dtype=getattr(torch, spec.dtype),
        device=spec.device,
    )
