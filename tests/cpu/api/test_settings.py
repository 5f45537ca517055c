"""Options of the server that are refused before anything listens."""

from typing import Any

import pytest

from stagecoach.api.settings import ServerSettings
from stagecoach.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"served_model_names": ()}, "--served-model-name"),
        ({"served_model_names": ("a", "")}, "--served-model-name"),
        ({"port": -1}, "--port=-1"),
        ({"port": 65536}, "--port=65536"),
        ({"max_queue_requests": 0}, "--max-queue-requests=0"),
        ({"max_body_bytes": 0}, "--max-body-bytes=0"),
        ({"shutdown_timeout_seconds": -1.0}, "--shutdown-timeout=-1"),
        ({"shutdown_timeout_seconds": float("nan")}, "--shutdown-timeout=nan"),
        ({"stall_timeout_seconds": float("inf")}, "--stall-timeout=inf"),
        ({"api_server_count": 0}, "--api-server-count=0"),
        ({"client_header_timeout_seconds": 0.0}, "--client-header-timeout=0"),
        ({"client_body_timeout_seconds": -1.0}, "--client-body-timeout=-1"),
        ({"send_timeout_seconds": float("inf")}, "--send-timeout=inf"),
        ({"request_timeout_seconds": float("nan")}, "--request-timeout=nan"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"api_keys": ("a b",)}, "--api-key"),
        ({"api_keys": ("schlüssel",)}, "--api-key"),
        ({"root_path": "v1"}, "--root-path=v1"),
    ],
)
def test_an_option_out_of_its_range_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**{"served_model_names": ("m",)} | fields)


def test_a_key_is_in_no_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(served_model_names=("m",), api_keys=("secret key",))
    assert "secret" not in str(caught.value)
