"""What is known of integers before the kernel runs, and the masks that it decides."""

from collections.abc import Iterator

from vllm_triton.compile.triton_cpu.ir import Function, Operation, Region, Value

_VIEWS = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.unsplat")
_LARGEST = 2**31 - 1


def bounds(value: Value) -> tuple[int, int] | None:
    """The least and the largest value that an element can have; None where nothing is known."""
    operation = value.producer
    if operation is None or value.type.element not in ("i32", "i64"):
        return None
    if operation.name == "arith.constant":
        number = operation.attributes["value"]
        return None if isinstance(number, list) else (int(number), int(number))
    if operation.name == "tt.make_range":
        return operation.attributes["start"], operation.attributes["end"] - 1
    if operation.name in _VIEWS or operation.name == "arith.extsi":
        return bounds(operation.operands[0])
    if operation.name not in ("arith.addi", "arith.muli"):
        return None
    known = [bounds(operand) for operand in operation.operands]
    if known[0] is None or known[1] is None:
        return None
    (low, high), (other_low, other_high) = known[0], known[1]
    if operation.name == "arith.addi":
        low, high = low + other_low, high + other_high
    else:
        corners = [low * other_low, low * other_high, high * other_low, high * other_high]
        low, high = min(corners), max(corners)
    return (low, high) if low >= -_LARGEST and high <= _LARGEST else None


def decided(comparison: Operation) -> bool | None:
    """The result of an arith.cmpi where it is the same for all elements that there can be; else None."""
    left, right = (bounds(operand) for operand in comparison.operands)
    if left is None or right is None:
        return None
    predicate = next((word for word in comparison.words if word in ("slt", "sle", "sgt", "sge")), None)
    if predicate in ("sgt", "sge"):
        left, right = right, left
    if predicate in ("slt", "sgt"):
        return True if left[1] < right[0] else False if left[0] >= right[1] else None
    if predicate in ("sle", "sge"):
        return True if left[1] <= right[0] else False if left[0] > right[1] else None
    return None


def drop_masks(function: Function) -> None:
    """Takes masks that always hold from loads and stores."""
    for operation in _operations(function.body):
        place = {"tt.load": 1, "tt.store": 2}.get(operation.name)
        if place is not None and len(operation.operands) > place and _holds(operation.operands[place]):
            for operand in operation.operands[place:]:
                operand.uses.remove(operation)
            del operation.operands[place:]


def _holds(mask: Value) -> bool:
    operation = mask.producer
    if operation is None:
        return False
    if operation.name == "arith.constant":
        return operation.attributes["value"] is True
    if operation.name == "arith.cmpi":
        return decided(operation) is True
    return operation.name in ("arith.andi", *_VIEWS) and all(map(_holds, operation.operands))


def _operations(region: Region) -> Iterator[Operation]:
    for block in region.blocks:
        for operation in block.operations:
            yield operation
            for inner in operation.regions:
                yield from _operations(inner)
