"""Which graph a step runs as."""

import pytest

from vllm_triton.compile.graphs.modes import BatchDescriptor, Dispatcher, RuntimeMode, default_capture_sizes

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
BOTH = Dispatcher({FULL: [8, 1], PIECEWISE: [1, 8]})
WHOLE = Dispatcher({FULL: [1, 8]})


@pytest.mark.parametrize(
    ("dispatcher", "num_tokens", "num_reqs", "uniform", "allow_full", "mode", "descriptor"),
    [
        (BOTH, 8, 8, True, True, FULL, BatchDescriptor(8, 8, True)),
        (BOTH, 5, 5, True, True, FULL, BatchDescriptor(8, 8, True)),
        (BOTH, 1, 1, True, True, FULL, BatchDescriptor(1, 1, True)),
        (BOTH, 15, 15, True, True, NONE, BatchDescriptor(15, 15, True)),
        (BOTH, 15, 2, False, True, NONE, BatchDescriptor(15, 2, False)),
        (BOTH, 8, 8, True, False, PIECEWISE, BatchDescriptor(8)),
        (BOTH, 6, 2, False, True, PIECEWISE, BatchDescriptor(8)),
        (WHOLE, 8, 8, True, False, NONE, BatchDescriptor(8, 8, True)),
        (WHOLE, 6, 2, False, True, NONE, BatchDescriptor(6, 2, False)),
        (Dispatcher({}), 1, 1, True, True, NONE, BatchDescriptor(1, 1, True)),
    ],
)
def test_full_before_pieces_before_none(dispatcher, num_tokens, num_reqs, uniform, allow_full, mode, descriptor):
    found = dispatcher.dispatch(num_tokens, num_reqs, uniform, allow_full)
    assert (found.mode, found.descriptor) == (mode, descriptor)


def test_default_sizes_end_with_the_largest_batch():
    assert default_capture_sizes(1) == [1]
    assert default_capture_sizes(8) == [1, 2, 4, 8]
    assert default_capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert default_capture_sizes(1000)[-2:] == [504, 512]
