from __future__ import annotations

from collections.abc import Iterator

import pytest

from calstack.server.config import LimitsConfig
from tests.support.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server"), limits=LimitsConfig(keepalive_s=0.2)) as running:
        yield running
