"""Who runs next and who makes room: the two scheduling policies."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection

from vllm_triton.scheduler.request import Request


class WaitingQueue(ABC):
    """Requests that do not run, in the order in which they are to start."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queues a new request."""

    @abstractmethod
    def add_preempted(self, request: Request) -> None:
        """Queues a request that already ran."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to start next; the queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Takes out the request to start next; the queue must not be empty."""

    @abstractmethod
    def remove(self, requests: Collection[Request]) -> None:
        """Takes out those of the requests that are queued, in one pass."""

    @abstractmethod
    def choose_victim(self, running: list[Request]) -> Request:
        """The running request to preempt when blocks run out; `running` must not be empty."""


class FCFSQueue(WaitingQueue):
    """First come, first served. Preempted requests go to the front; the one that started last is preempted first."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def add_preempted(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: Collection[Request]) -> None:
        self._requests = deque(request for request in self._requests if request not in requests)

    def choose_victim(self, running: list[Request]) -> Request:
        return running[-1]


class PriorityQueue(WaitingQueue):
    """Smallest priority first, then earliest arrival; the last in this order is preempted first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def add_preempted(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)

    def choose_victim(self, running: list[Request]) -> Request:
        return max(running, key=lambda request: request.order)


WAITING_QUEUES: dict[str, type[WaitingQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
