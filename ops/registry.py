"""One registry, one table, for our kernels and for anybody's.

An op is defined once (`define_op`), with its contract and its reference; implementations join it with
`@op.impl("name", supports=...)`. The engine resolves one implementation per op when it starts and freezes the choice.
"""

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_triton.ops.contract import Argument, Contract, Tensor
from vllm_triton.ops.errors import RegistryError
from vllm_triton.ops.platforms import Platform, current_platform

NAMESPACE = "vllm_triton"


@dataclass(frozen=True)
class Situation:
    """What `supports` may decide on. None means not known yet, and must not be a reason to refuse."""

    device: str = "cpu"
    dtype: torch.dtype | None = None
    head_size: int | None = None
    block_size: int | None = None
    sliding_window: int | None = None
    kv_cache_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None


Supports = Callable[[Situation], str | None]


class Capture(enum.IntEnum):
    """Steps in which an implementation's work may be captured once and replayed with other values of the same shapes.

    NEVER: it reads values on the host, or calls what the device's graphs cannot hold. SINGLE_TOKEN_DECODE: one token a
    request. UNIFORM_BATCH: equally many tokens a request. ALWAYS: any step.
    """

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


# By device type: a CPU's graphs hold Triton launches alone, and no graph can hold a value that the host reads.
TORCH_CALLS = {"cpu": Capture.NEVER}
HOST_READS = {"cpu": Capture.NEVER, "cuda": Capture.NEVER}


@dataclass(frozen=True)
class Implementation:
    """A function with the op's arguments in order.

    supports: None, or the reason why not, as text.
    compile_cases: real configurations of its Triton kernels (ops.launch.CompileCase).
    capture: by device type; ALWAYS on the others.
    """

    name: str
    function: Callable[..., Any]
    supports: Supports
    compile_cases: tuple[Any, ...] = ()
    capture: Mapping[str, Capture] = field(default_factory=dict)

    def captured_in(self, device: str) -> Capture:
        return self.capture.get(device, Capture.ALWAYS)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Op:
    """A custom op `torch.ops.vllm_triton.<name>`, its contract and its implementations.

    Calling it checks the arguments (outside a trace and `trusted_calls`) and runs the chosen implementation.
    """

    def __init__(self, contract: Contract, reference: Callable[..., Any], doc: str | None):
        self.contract = contract
        self.name = contract.name
        self.reference = reference
        self.__doc__ = doc
        self.implementations: dict[str, Implementation] = {}
        self._active: Implementation | None = None
        self.impl("reference", capture=HOST_READS)(reference)
        _LIBRARY.define(f"{self.name}{contract.schema}")
        _LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", contract.fake, lib=_LIBRARY)
        self.torch_op = getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args: Any) -> Any:
        missing = len(self.contract.args) - len(args)
        if missing and missing <= len(self.contract.defaults):
            args += self.contract.defaults[-missing:]
        if torch.compiler.is_compiling():
            return self.torch_op(*args)
        if _calls.trusted:  # without torch's dispatcher, which takes as long as a small op
            return self._run(*args)
        self.contract.check(args)
        return self.torch_op(*args)

    def implementation_now(self) -> Implementation:
        """The one that a call runs."""
        return self._active or self._default()

    def _run(self, *args: Any) -> Any:
        return self.implementation_now().function(*args)

    def _default(self) -> Implementation:
        platform = current_platform()
        chosen = choose(self, platform, Situation(platform.device))
        self._active = self.implementations[chosen["chosen"]]
        return self._active

    def impl(
        self,
        name: str,
        supports: Supports | None = None,
        compile_cases: Sequence[Any] = (),
        capture: Mapping[str, Capture] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers an implementation; `supports` sees a Situation and returns None or the reason why not.

        Args: see Implementation. One that calls torch has `capture=TORCH_CALLS`.
        Raises: RegistryError where the name is taken.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if name in self.implementations:
                raise RegistryError(f"{self.name}: implementation name must be new, got {name!r}")
            self.implementations[name] = Implementation(
                name, function, supports or (lambda situation: None), tuple(compile_cases), capture or {}
            )
            return function

        return register

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Runs another implementation inside the block, for tests and comparisons; not beside a running engine."""
        previous, self._active = self._active, self.implementation(name)
        try:
            yield
        finally:
            self._active = previous

    def implementation(self, name: str) -> Implementation:
        if name not in self.implementations:
            raise RegistryError(
                f"{self.name}: implementation must be one of {', '.join(self.implementations)}, got {name!r}"
            )
        return self.implementations[name]


class _Calls(threading.local):
    trusted = False


_calls = _Calls()


@contextlib.contextmanager
def trusted_calls() -> Iterator[None]:
    """Leaves out the checks of this thread's op calls inside the block.

    For a caller whose calls of the same kind were checked before: a check costs 3 to 9 us, as much as a small op.
    """
    previous, _calls.trusted = _calls.trusted, True
    try:
        yield
    finally:
        _calls.trusted = previous


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPS: dict[str, Op] = {}
_frozen: dict[str, str] | None = None


def define_op(
    args: Mapping[str, Argument],
    reference: Callable[..., Any],
    results: Mapping[str, Tensor] | None = None,
    **contract_fields: Any,
) -> Callable[[Callable[..., Any]], Op]:
    """Makes an op of a function that has only a signature and a docstring; the other fields are Contract's."""

    def decorate(function: Callable[..., Any]) -> Op:
        name = function.__name__
        signature = function.__code__.co_varnames[: function.__code__.co_argcount]
        if list(signature) != list(args):
            raise RegistryError(f"{name}: contract must list the arguments {list(signature)}, got {list(args)}")
        defaults = function.__defaults__ or ()  # type: ignore[attr-defined]
        op = Op(Contract(name, args, results or {}, defaults=defaults, **contract_fields), reference, function.__doc__)
        OPS[name] = op
        return op

    return decorate


def choose(op: Op, platform: Platform, situation: Situation, explicit: str | None = None) -> dict[str, Any]:
    """Picks one implementation; returns {"op", "chosen", "why", "implementations": [{"name", "rejected_because"}]}.

    Raises: RegistryError where the explicit choice is unknown or refuses; it never falls back in silence.
    """
    reasons = {name: impl.supports(situation) for name, impl in op.implementations.items()}
    if explicit is not None:
        reason = op.implementation(explicit).supports(situation)
        if reason is not None:
            raise RegistryError(f"{op.name}: {explicit!r} was asked for but cannot run: {reason}")
        chosen, why = explicit, "asked for"
    else:
        order = [name for name in platform.order(op.name) if name in reasons]
        usable = [name for name in order if reasons[name] is None]
        if not usable:
            raise RegistryError(f"{op.name}: no implementation runs on {platform.name}: {reasons}")
        chosen, why = usable[0], f"first that runs in the order of {platform.name}: {', '.join(order)}"
    rows = []
    for name, reason in reasons.items():
        if name != chosen and reason is None:
            reason = f"{chosen} was asked for" if explicit else f"{platform.name} prefers {chosen}"
        rows.append({"name": name, "rejected_because": None if name == chosen else reason})
    return {"op": op.name, "chosen": chosen, "why": why, "implementations": rows}


def explain(choices: Mapping[str, str], situation: Situation, platform: Platform | None = None) -> list[dict[str, Any]]:
    """The choice of every op, see `choose`.

    Args:
        choices: op name -> implementation name, for the ops whose implementation the user chose.
    Raises: RegistryError for an unknown op or implementation, listing the valid ones.
    """
    unknown = [name for name in choices if name not in OPS]
    if unknown:
        raise RegistryError(f"kernels: op must be one of {', '.join(sorted(OPS))}, got {', '.join(unknown)}")
    platform = platform or current_platform()
    return [choose(op, platform, situation, choices.get(name)) for name, op in sorted(OPS.items())]


def freeze(choices: Mapping[str, str], situation: Situation) -> dict[str, str]:
    """Resolves every op for an engine and holds the choice for the life of the process; returns op -> implementation.

    Raises: RegistryError where an earlier engine of this process runs other implementations, since torch's custom ops
        are global to the process.
    """
    global _frozen
    selection = {row["op"]: row["chosen"] for row in explain(choices, situation)}
    if _frozen is not None and _frozen != selection:
        changed = [f"{op} ({_frozen[op]} -> {name})" for op, name in selection.items() if _frozen[op] != name]
        raise RegistryError(
            f"kernels: choices are fixed once an engine has started, got a change of {', '.join(changed)}"
        )
    for name, chosen in selection.items():
        OPS[name]._active = OPS[name].implementations[chosen]
    _frozen = selection
    return dict(selection)


def parse_choices(text: str) -> dict[str, str]:
    """Reads "paged_attention=mine,linear=torch"."""
    choices = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        op, separator, name = part.partition("=")
        if not separator or not op.strip() or not name.strip():
            raise RegistryError(f"kernels: choice must have the form op=implementation, got {part!r}")
        choices[op.strip()] = name.strip()
    return choices
