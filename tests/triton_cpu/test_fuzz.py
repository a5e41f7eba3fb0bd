"""Random kernels: natively, by a reference over torch, and in Triton's interpreter, all three equal.

More of them, others, and a failing one made as small as it gets (minutes, without end where --timeout is 0):

    TRITON_INTERPRET=0 FUZZ_EXAMPLES=2000 FUZZ_SEED=1 python -m pytest --timeout 0 tests/triton_cpu/test_fuzz.py
"""

import os

import fuzz_reference
import pytest
from fuzz_kernels import Generator
from fuzz_worker import HEAD, Job, Worker
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
USUAL_EXAMPLES = 60
SEED = int(os.environ.get("FUZZ_SEED", "0"))
# Its bfloat16 is a 16-bit integer to some operations.
NOT_INTERPRETED = "bfloat16"


class Drawn:
    """Choices that Hypothesis makes, and makes simpler where a kernel fails."""

    def __init__(self, draw):
        self._draw = draw

    def integer(self, low, high):
        return self._draw(st.integers(low, high))

    def choice(self, options):
        return self._draw(st.sampled_from(options))


programs = st.composite(lambda draw: Generator(Drawn(draw)).program())()


@pytest.fixture(scope="module")
def workers():
    started = {"native": Worker(interpret=False), "interpreter": Worker(interpret=True)}
    yield started
    for worker in started.values():
        worker.close()


def compare(program, workers, folder):
    """Raises AssertionError, with the kernel's source and arguments, where one of the ways differs."""
    buffers = program.buffers()
    expected = [buffer.clone() for buffer in buffers]
    try:
        ends = fuzz_reference.run(program.source, expected, program.scalars, program.programs)
    except fuzz_reference.Rejected:
        assume(False)
    path = folder / f"kernel_{abs(hash(program.source))}.py"
    path.write_text(HEAD + program.source)
    job = Job(buffers, ends, program.scalars, program.programs)
    told = f"{HEAD}{program.source}\nscalars {program.scalars}, {program.programs} programs, {program}"
    for way in ("native", "interpreter"):
        if way == "interpreter" and NOT_INTERPRETED in program.dtypes:
            continue
        try:
            results = workers[way].run(path, job)
        except RuntimeError as error:
            workers[way].close()
            workers[way] = Worker(interpret=way == "interpreter")
            raise AssertionError(f"{way}: {error}\n{told}") from None
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            different = ~((result == wanted) | (result.isnan() & wanted.isnan()))
            places = different.nonzero().flatten()[:8]
            assert not len(places), (
                f"{way}: buffer {number} at {places.tolist()} is {result[places].tolist()}, "
                f"must be {wanted[places].tolist()}\n{told}"
            )
    path.unlink()


@seed(SEED)
@settings(
    max_examples=NUM_EXAMPLES or USUAL_EXAMPLES,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink] if NUM_EXAMPLES else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(program=programs)
def test_random_kernels(program, workers, tmp_path_factory):
    compare(program, workers, tmp_path_factory.getbasetemp())
