"""The two waiting queues against their definitions."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_simulation import make_engine_request

from vllm_triton.scheduler.queue import FCFSQueue, PriorityQueue
from vllm_triton.scheduler.request import Request

# What is done with the queue: the priority of a request that is added, or whom to take out.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "add_preempted"]), st.integers(0, 3)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(1, 3)),
    ),
    max_size=40,
)


def apply(queue, operations, insert):
    """Applies the operations to the queue and to a list, into which `insert` puts new requests where they belong."""
    expected = []
    for number, (operation, value) in enumerate(operations):
        if operation == "pop":
            if expected:
                assert queue.peek() is expected[0]
                assert queue.pop() is expected.pop(0)
        elif operation == "remove":
            gone = set(expected[::value])
            queue.remove(gone)
            expected = [request for request in expected if request not in gone]
        else:
            source = make_engine_request(str(number), [1], priority=value, arrival_time=float(number // 3))
            request = Request(source, 10, number)
            getattr(queue, operation)(request)
            insert(expected, request, operation)
        assert len(queue) == len(expected)
    assert [queue.pop() for _ in range(len(queue))] == expected


@given(OPERATIONS)
def test_fcfs_keeps_the_order_of_arrival_and_preempted_ones_first(operations):
    def insert(expected, request, operation):
        expected.insert(0 if operation == "add_preempted" else len(expected), request)

    apply(FCFSQueue(), operations, insert)


@given(OPERATIONS)
def test_priority_orders_by_priority_then_arrival_then_admission(operations):
    def insert(expected, request, operation):
        expected.append(request)
        expected.sort(key=lambda other: other.order)

    apply(PriorityQueue(), operations, insert)


def test_priority_keeps_its_order_when_the_first_is_taken_out():
    queue = PriorityQueue()
    requests = [Request(make_engine_request(str(n), [1], priority=n), 10, 0) for n in (1, 3, 0, 2)]
    for request in requests:
        queue.add(request)
    queue.remove({requests[2]})
    assert [queue.pop().request_id for _ in range(len(queue))] == ["1", "2", "3"]


def test_victims():
    requests = [
        Request(make_engine_request(name, [1], priority=priority, arrival_time=arrival), 10, number)
        for number, (name, priority, arrival) in enumerate([("a", 0, 5.0), ("b", 2, 1.0), ("c", 2, 3.0), ("d", 1, 9.0)])
    ]
    assert FCFSQueue().choose_victim(requests).request_id == "d"
    assert PriorityQueue().choose_victim(requests).request_id == "c"
