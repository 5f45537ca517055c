"""Load of the simplest kind: clients that stream until an error ends them."""

import threading
import time
from typing import Any

import openai

FIELDS: dict[str, Any] = {
    "model": "small",
    "prompt": "abc",
    "stream": True,
    "max_tokens": 300,
    "extra_body": {"ignore_eos": True},
}


class EndlessStreams:
    """Clients that stream one answer after the other until an error ends them.

    Attributes:
        ends: what each of them ended with.
    """

    def __init__(self, url: str, num_streams: int) -> None:
        self.ends: list[openai.OpenAIError] = []
        self._url = url
        self._has_begun = threading.Barrier(num_streams + 1)
        self._threads = [threading.Thread(target=self._read) for _ in range(num_streams)]
        for thread in self._threads:
            thread.start()
        self._has_begun.wait(30)

    def _read(self) -> None:
        is_first = True
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
            try:
                while True:
                    for _ in client.completions.create(**FIELDS):
                        if is_first:
                            self._has_begun.wait(30)
                        is_first = False
            except openai.OpenAIError as error:
                self.ends.append(error)
                if is_first:
                    self._has_begun.abort()

    def wait_for_ends(self, num_ends: int, seconds: float) -> None:
        """Until that many have ended."""
        deadline = time.monotonic() + seconds
        while len(self.ends) < num_ends:
            assert time.monotonic() < deadline, self.ends
            time.sleep(0.02)

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive()
