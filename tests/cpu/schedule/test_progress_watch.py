"""What is said when nothing moves, and when too many plans were for nothing."""

from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.progress_watch import Blocked, ProgressWatch, stall_report


def make_request(request_id: int, num_tokens: int = 8) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_tokens)),
        params=SamplingParams(),
        seed=0,
        max_tokens=4,
    )


def test_the_report_names_who_waits_for_what_and_who_holds_it() -> None:
    waiting, running = make_request(7), make_request(3)
    running.page_ids.extend([4, 5])
    running.slot, running.epoch, running.num_computed, running.num_plans_in_flight = 2, 1, 6, 1
    text = stall_report(
        "nothing can be planned: 1 waiting",
        [
            Blocked(running, "between chunks", num_wanted_pages=1),
            Blocked(waiting, "waiting", num_wanted_pages=3, wants_slot=True),
        ],
    )
    assert text.splitlines() == [
        "nothing can be planned: 1 waiting",
        "  request 3.1 (between chunks) at 6 of 8 tokens wants 1 page, the results of 1 plan; "
        "it holds 2 pages, slot 2",
        "  request 7.0 (waiting) at 0 of 8 tokens wants 3 pages, a state slot; it holds nothing",
    ]


def test_a_long_queue_is_cut_and_counted() -> None:
    blocked = [Blocked(make_request(number), "waiting") for number in range(50)]
    lines = stall_report("stop", blocked).splitlines()
    assert len(lines) == 22 and lines[-1] == "  and 30 more"


def test_plans_are_counted_from_the_last_that_something_came_of() -> None:
    watch = ProgressWatch(max_model_len=10, most_in_flight=2)
    for _ in range(watch.limit):
        watch.note_plan()
    assert not watch.is_over
    watch.note_progress()
    for _ in range(watch.limit):
        watch.note_plan()
    assert not watch.is_over
    watch.note_plan()
    assert watch.is_over
