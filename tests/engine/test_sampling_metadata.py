"""What is written once for a batch that stays the same is written anew as soon as it is another one."""

import numpy as np
import torch

from vllm_triton.runner.input_batch import InputBatch
from vllm_triton.sampling.metadata import Draw, SamplingBuffers, SamplingMetadata, build_sampling_metadata
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.output import NewRequestData, SchedulerOutput

CPU = torch.device("cpu")


def _request(name: str, **params) -> NewRequestData:
    return NewRequestData(name, [3, 4], 2, SamplingParams(**params), frozenset({2}), [1], 0)


class Steps:
    """A batch and its buffers; every step of it is compared with one built into buffers that were never written."""

    def __init__(self, *requests: NewRequestData):
        self.batch, self.buffers = InputBatch(4, 32, 8), SamplingBuffers(4, CPU)
        self.batch.apply(SchedulerOutput(new_requests=list(requests)))

    def metadata(self, rows: list[int] | None = None, size: int = 4) -> SamplingMetadata:
        numbers = np.arange(len(self.batch)) if rows is None else np.array(rows)
        found = build_sampling_metadata(self.batch, numbers, self.buffers, size, CPU)
        fresh = build_sampling_metadata(self.batch, numbers, SamplingBuffers(4, CPU), size, CPU)
        assert found.is_plain == fresh.is_plain
        for name in Draw.__dataclass_fields__:
            values, expected = getattr(found.draw, name), getattr(fresh.draw, name)
            # Of rows that are padding the temperature counts alone.
            end = size if name == "temperature" else len(numbers)
            assert values[:end].tolist() == expected[:end].tolist(), name
        for row in numbers.tolist():
            self.batch.append_tokens(row, [7])
        return found


def test_steps_of_one_batch():
    steps = Steps(_request("a", seed=1, top_k=5), _request("b", seed=2, temperature=0.5))
    assert [steps.metadata().draw.steps[:2].tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_another_request_in_the_same_row():
    steps = Steps(_request("a", seed=1, top_k=5), _request("b", seed=2, temperature=0.5))
    steps.metadata()
    steps.batch.apply(SchedulerOutput(removed_request_ids=["a"], new_requests=[_request("c", seed=9, top_p=0.5)]))
    assert steps.metadata().draw.seeds[:2].tolist() == [2, 9]
    steps.batch.clear()
    steps.batch.apply(SchedulerOutput(new_requests=[_request("d", seed=4), _request("e", seed=5)]))
    assert steps.metadata().draw.seeds[:2].tolist() == [4, 5]


def test_another_size_and_fewer_rows():
    steps = Steps(*(_request(name, seed=1) for name in "abcd"))
    steps.metadata()
    steps.batch.apply(SchedulerOutput(removed_request_ids=["c", "d"]))
    steps.metadata(size=2)
    steps.metadata(size=4)  # rows 2 and 3 still held the temperatures of c and d
    steps.metadata(rows=[1], size=1)
    steps.metadata(size=4)


def test_min_tokens_forbid_the_end_until_they_are_there():
    steps = Steps(_request("a", seed=1, min_tokens=2))
    assert [steps.metadata().is_plain for _ in range(4)] == [False, False, True, True]


def test_penalties_hold_in_every_step():
    steps = Steps(_request("a", seed=1), _request("b", seed=2, presence_penalty=0.5))
    for length in (2, 3):
        penalties = steps.metadata().penalties
        assert penalties is not None and penalties.total_lens.tolist() == [0, length]
