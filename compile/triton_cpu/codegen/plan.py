"""Which values become memory, decided before any code is written.

A tensor is computed where it is read, inside the reader's loop, unless that would repeat much work, read memory at
another time than the kernel does, or is impossible: then it gets a buffer.
"""

from vllm_triton.compile.triton_cpu.codegen import elementwise
from vllm_triton.compile.triton_cpu.codegen.types import shape_of
from vllm_triton.compile.triton_cpu.ir import Block, Operation, Region, Value

# Computed where they are read, at no cost.
VIEWS = frozenset(
    {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.make_range", "arith.constant"}
    | {"tt.join", "tt.split", "tt.unsplat", "tt.addptr", "ub.poison"}
)
SIDE_EFFECTS = frozenset(["tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.print", "tt.assert", "tt.call"])
# More than this, and a second reader finds the value in memory.
CHEAP = 6.0
# The same for a float that is repeated along the lanes: it would be computed one element at a time.
CHEAP_SCALAR = 2.0
# From so many elements on, a load that a store reads is worth a look whether it may be read in place.
LONG_ROW = 64


class Plan:
    """Args: body: of one function."""

    def __init__(self, body: Region):
        self.buffered: set[Value] = set()
        # Loads that are read in the loop of the store that they wait for.
        self.waiting: dict[Operation, list[Value]] = {}
        self._cost: dict[Value, float] = {}
        self._read: set[Value] = set()
        self._owner: dict[Operation, Block] = {}
        self._depth: dict[Block, int] = {}
        self._place(body, 0)
        for block in self._depth:
            for operation in block.operations:
                for result in operation.results:
                    if result.type.is_tensor:
                        self._decide(operation, result, block)
        for block in self._depth:
            for index, operation in enumerate(block.operations):
                is_tile = operation.name == "tt.load" and operation.result.type.is_tensor
                if is_tile and not self._read_at_once(operation, block, index):
                    self.buffered.add(operation.result)

    def _place(self, region: Region, depth: int) -> None:
        for block in region.blocks:
            self._depth[block] = depth
            for operation in block.operations:
                self._owner[operation] = block
                for inner in operation.regions:
                    self._place(inner, depth + 1)

    def is_local(self, value: Value, operation: Operation) -> bool:
        """Whether the value is made in the operation's own block: each run of the one is a run of the other."""
        block = self._owner[operation]
        return value in block.arguments or (value.producer is not None and self._owner.get(value.producer) is block)

    def _decide(self, operation: Operation, value: Value, block: Block) -> None:
        if operation.name == "tt.load":
            self._read.add(value)
            self._cost[value] = 2.0
        elif operation.name in VIEWS:
            if any(operand in self._read for operand in operation.operands):
                self._read.add(value)
            self._cost[value] = max((self.cost(operand) for operand in operation.operands), default=0.0)
            if operation.name == "tt.join":
                self._cost[value] *= 2
        elif operation.name in elementwise.NAMES:
            if self._is_read(operation):
                self._read.add(value)
            if value.type.is_pointer or self._is_index(value):
                self._cost[value] = 0.5 + sum(self.cost(operand) for operand in operation.operands) / 2
            else:
                own = elementwise.COST.get(operation.name, 1)
                self._cost[value] = own + sum(self.cost(operand) for operand in operation.operands)
            if self._worth_memory(value, block):
                self.buffered.add(value)
                self._cost[value] = 1.0
        else:  # reductions, products, loops: their results are memory in any case
            self._cost[value] = 1.0

    def cost(self, value: Value) -> float:
        return self._cost.get(value, 0.0 if not value.type.is_tensor else 1.0)

    def _is_index(self, value: Value) -> bool:
        """Whether it counts elements: most of it happens once for many."""
        return value.type.element in ("i32", "i64", "i1") and value not in self._read

    def _is_read(self, operation: Operation) -> bool:
        """Whether an operand comes from memory or from floats, not from ranges and scalars alone."""
        return any(
            operand.type.is_tensor and (operand in self._read or not self._is_index(operand))
            for operand in operation.operands
        )

    def _worth_memory(self, value: Value, block: Block) -> bool:
        if value.type.is_pointer or self.cost(value) <= CHEAP_SCALAR:
            return False
        if not self._is_index(value) and is_spread(value):
            return True
        if self.cost(value) <= CHEAP:
            return False
        deeper = any(self._depth[self._owner[use]] > self._depth[block] for use in value.uses)
        expanded = any(use.name in ("tt.expand_dims", "tt.broadcast", "tt.trans") for use in value.uses)
        return deeper or expanded or len(set(value.uses)) > 1

    def _read_at_once(self, load: Operation, block: Block, index: int) -> bool:
        """Whether the load may happen inside the loop of all its readers: nothing is written in between."""
        ends = self._ends(load.result, block)
        if len(ends) != 1:
            return False
        reader, value, is_turned = ends.pop()
        following = block.operations.index(reader) if self._owner[reader] is block else None
        if following is None or any(_writes(between) for between in block.operations[index + 1 : following]):
            return False
        if reader.name == "tt.dot":
            return value is not reader.operands[2]
        if reader.name == "tt.store":
            if value is not reader.operands[1] or is_turned or not _is_long_row(load.result):
                return False
            self.waiting.setdefault(reader, []).append(load.result)
            return True
        return reader.name in ("tt.reduce", "scf.yield") or any(result in self.buffered for result in reader.results)

    def _ends(self, value: Value, block: Block) -> set[tuple[Operation, Value, bool]]:
        """What a value's computation ends in: each operation, the operand it reads, and whether that is transposed."""
        ends, left, seen = set(), [(value, False)], {(value, False)}
        while left:
            value, is_turned = left.pop()
            for reader in value.uses:
                passes = reader.name in elementwise.NAMES or reader.name in ("tt.splat", "tt.reshape", "tt.trans")
                if not passes or reader.result in self.buffered or self._owner[reader] is not block:
                    ends.add((reader, value, is_turned))
                    continue
                following = (reader.result, is_turned or reader.name == "tt.trans")
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        return ends


def is_spread(value: Value) -> bool:
    """Whether a reader repeats each element along a new last axis."""
    for use in value.uses:
        if use.name == "tt.expand_dims" and use.attributes["axis"] == len(value.type.shape or ()):
            return True
        if use.name == "tt.reshape" and (is_spread(use.result) or shape_of(use.result.type)[-1] == 1):
            return True
    return False


def _is_long_row(value: Value) -> bool:
    shape = shape_of(value.type)
    return value.type.size >= LONG_ROW and value.type.size in shape


def _writes(operation: Operation) -> bool:
    if operation.name in SIDE_EFFECTS:
        return True
    return any(_writes(inner) for region in operation.regions for block in region.blocks for inner in block.operations)
