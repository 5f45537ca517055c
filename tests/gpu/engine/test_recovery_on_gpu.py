"""Workers with GPUs are killed under streams, and streams go on."""

import os
import signal
import threading
import time

import pytest
import torch

from stagecoach import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

_LIMIT_SECONDS = 240.0
_PARAMS = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
_PROMPTS = [[1 + 3 * number, 5, 9] for number in range(4)]


@pytest.mark.parametrize(("num_stages", "tp_size"), [(1, 1), (2, 1), (1, 2)])
def test_a_killed_worker_costs_time_and_no_token(num_stages: int, tp_size: int) -> None:
    """Every token that was told stays, and each answer is as long as it was to be."""
    if torch.cuda.device_count() < num_stages * tp_size:
        pytest.skip(f"needs {num_stages * tp_size} GPUs")
    with LLM(
        "demo",
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=tp_size,
        device="cuda",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        recover=True,
        show_progress=False,
    ) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _PARAMS)]
        told: list[list[int]] = [[] for _ in _PROMPTS]

        def stream(place: int) -> None:
            for output in llm.stream(_PROMPTS[place], _PARAMS):
                token_ids = list(output.outputs[0].token_ids)
                assert token_ids[: len(told[place])] == told[place]
                told[place] = token_ids

        threads = [threading.Thread(target=stream, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _LIMIT_SECONDS
        while min(map(len, told)) < 20:
            assert time.monotonic() < deadline, told
            time.sleep(0.001)
        process_ids = llm.client.engine.process_ids  # type: ignore[attr-defined]
        os.kill(process_ids[f"worker[{num_stages - 1},{tp_size - 1}]"], signal.SIGKILL)
        for thread in threads:
            thread.join(_LIMIT_SECONDS)
        assert [len(token_ids) for token_ids in told] == [120] * 4
        assert llm.stats().num_recoveries == 1
        # The replay adds up in other batches; the demo is sure of nearly all of its tokens.
        num_equal = sum(one == other for one, other in zip(told, expected, strict=True))
        assert num_equal >= 3, (told, expected)
