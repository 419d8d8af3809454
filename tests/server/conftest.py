"""The engine and the server of the tests by API: one of each for all of them."""

from collections.abc import Iterator

import pytest
import tiny_adapters
from serving import BOX, Live, live, until

from fengine.api.engine import Engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    adapter = tiny_adapters.random_adapter(tmp_path_factory.mktemp("sql"), BOX, 2)
    with Engine(
        model_path="box", enable_torch_compile=False, enable_return_hidden_states=True,
        enable_custom_logit_processor=True, lora_paths={"sql": str(adapter)},
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="session")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine, admin_key="admin", allow_origins=["http://page"]) as server:
        yield server
        until(server.quiet)
