"""Order of arrival is kept by every move between the queues."""

from hypothesis import given
from hypothesis import strategies as st

from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.queues import Queues


def make_requests(count: int) -> list[Request]:
    return [
        Request(
            request_id=100 + index,
            prompt_token_ids=(1, 2),
            params=SamplingParams(),
            seed=0,
            max_tokens=4,
            arrival_index=index,
        )
        for index in range(count)
    ]


@given(st.integers(1, 6), st.lists(st.integers(0, 5)))
def test_who_waits_again_gets_its_place_back(num_running: int, preempted: list[int]) -> None:
    queues, requests = Queues(), make_requests(6)
    queues.waiting.extend(requests)
    for request in requests[:num_running]:
        queues.start(request)
    for index in preempted:
        if requests[index].request_id in queues.running:
            queues.stop(requests[index])
            queues.wait_again(requests[index])
            assert requests[index].request_id not in queues.prefilling
        order = [request.arrival_index for request in queues.waiting]
        assert order == sorted(order)
        assert len(queues.waiting) + len(queues.running) == 6


def test_idle_juniors_are_younger_idle_and_youngest_first() -> None:
    queues, requests = Queues(), make_requests(6)
    queues.waiting.extend(requests)
    for request in requests:
        queues.start(request)
    requests[3].num_plans_in_flight = 1
    # It samples: neither between chunks nor ready.
    del queues.prefilling[requests[4].request_id]
    assert list(queues.idle_juniors(requests[1])) == [requests[5], requests[2]]
    assert list(queues.idle_juniors(requests[5])) == []
    assert list(queues.prefilling_seniors(requests[2])) == requests[:2]


def test_stopping_one_that_waits_or_runs_leaves_it_nowhere() -> None:
    queues, requests = Queues(), make_requests(3)
    queues.waiting.extend(requests)
    queues.start(requests[0])
    queues.ready[requests[0].request_id] = requests[0]
    queues.stop(requests[0])
    queues.stop(requests[2])
    assert list(queues.waiting) == [requests[1]]
    assert not queues.running and not queues.prefilling and not queues.ready


def test_a_request_is_in_one_state() -> None:
    queues = Queues()
    [request] = make_requests(1)
    queues.waiting.append(request)
    seen = [queues.state_of(request)]
    queues.start(request)
    seen.append(queues.state_of(request))
    del queues.prefilling[request.request_id]
    seen.append(queues.state_of(request))
    queues.ready[request.request_id] = request
    seen.append(queues.state_of(request))
    assert seen == ["waiting", "prefilling", "sampling", "ready"]
