"""For which numbers of tokens a piece is compiled."""

import pytest

from vllm_triton.compile.pieces.ranges import CompileRange, Ranged, compile_ranges


@pytest.mark.parametrize(
    ("endpoints", "most", "sizes", "expected"),
    [
        ([8, 32], 8192, [], ["1-8", "9-32", "33-8192"]),
        ([], 2048, [], ["1-2048"]),
        ([32, 8, 8], 64, [], ["1-8", "9-32", "33-64"]),
        ([64, 100], 64, [], ["1-64"]),
        ([8], 64, [4, 16, 128], ["4", "16", "1-8", "9-64"]),
        ([], 1, [], ["1"]),
    ],
)
def test_ranges(endpoints, most, sizes, expected):
    assert [str(each) for each in compile_ranges(endpoints, most, sizes)] == expected


def test_an_exact_size_runs_before_the_range_that_holds_it():
    ranges = compile_ranges([8], 64, [4])
    ranged = Ranged([(sizes, lambda num_tokens, name=str(sizes): name) for sizes in ranges])
    assert [ranged(number) for number in (1, 4, 5, 8, 9, 64)] == ["1-8", "4", "1-8", "1-8", "9-64", "9-64"]
    with pytest.raises(ValueError, match="compiled for 4, 1-8, 9-64 tokens, got 65"):
        ranged(65)
    assert 8 in CompileRange(1, 8) and 9 not in CompileRange(1, 8)
