"""Which of the kernel's arguments a pointer may come from: what bounds checks hold it against."""

from collections.abc import Iterable, Sequence

from vllm_triton.compile.triton_cpu.ir import Module, Operation, Region, Value

# Their pointers come from somewhere else: memory or a number.
_UNKNOWN = ("tt.load", "tt.int_to_ptr", "tt.atomic_rmw", "tt.atomic_cas")


class Provenance:
    """Follows pointers through operations, loops, branches and calls until nothing new is found."""

    def __init__(self, module: Module):
        self._module = module
        self._targets: dict[Value, list[Value]] = {}
        self._roots: dict[Value, set[int]] = {}
        self._unknown: set[Value] = set()
        for function in module.functions.values():
            self._region(function.body)
        work = []
        for number, argument in enumerate(module.kernel.arguments):
            if argument.type.is_pointer:
                self._roots[argument] = {number}
                work.append(argument)
        self._spread([*work, *self._unknown])

    def roots(self, pointer: Value) -> list[int] | None:
        """Numbers of the kernel's arguments; None where the pointer may come from elsewhere."""
        return None if pointer in self._unknown else sorted(self._roots.get(pointer, ()))

    def _spread(self, work: list[Value]) -> None:
        while work:
            source = work.pop()
            for target in self._targets.get(source, ()):
                known = self._roots.setdefault(target, set())
                before = len(known), target in self._unknown
                known |= self._roots.get(source, set())
                if source in self._unknown:
                    self._unknown.add(target)
                if before != (len(known), target in self._unknown):
                    work.append(target)

    def _flow(self, sources: Iterable[Value], targets: Iterable[Value]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target.type.is_pointer:
                self._targets.setdefault(source, []).append(target)

    def _region(self, region: Region) -> None:
        labels = {block.label: block for block in region.blocks}
        for block in region.blocks:
            for operation in block.operations:
                for label, values in operation.successors:
                    self._flow(values, labels[label].arguments)
                for inner in operation.regions:
                    self._region(inner)
                self._operation(operation)

    def _operation(self, operation: Operation) -> None:
        blocks = [region.blocks[0] for region in operation.regions]
        if operation.name == "scf.for":
            carried = blocks[0].arguments[1:]
            self._flow(operation.operands[3:], carried)
            self._flow(blocks[0].terminator.operands, carried)
            self._flow(carried, operation.results)
        elif operation.name == "scf.while":
            before, after = blocks
            self._flow(operation.operands, before.arguments)
            self._flow(before.terminator.operands[1:], after.arguments)
            self._flow(after.terminator.operands, before.arguments)
            self._flow(after.arguments, operation.results)
        elif operation.name == "scf.if":
            for block in blocks:
                self._flow(block.terminator.operands, operation.results)
        elif operation.name == "tt.call":
            self._call(operation)
        elif operation.name in _UNKNOWN:
            self._unknown |= {result for result in operation.results if result.type.is_pointer}
        else:
            self._through(operation.operands, operation.results)

    def _through(self, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Any operand's pointer may be any result's."""
        for operand in operands:
            if operand.type.is_pointer:
                self._flow([operand] * len(results), results)

    def _call(self, operation: Operation) -> None:
        function = self._module.functions[operation.callee]
        self._flow(operation.operands, function.arguments)
        for block in function.body.blocks:
            if block.terminator.name == "tt.return":
                self._flow(block.terminator.operands, operation.results)
