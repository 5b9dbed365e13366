"""The programs under test, one process each for all tests of a suite."""

from collections.abc import Iterator

import pytest

from tests.contract.raw import Wire
from tests.contract.targets import Target, kinds, target


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture(scope="module", params=kinds("scheduler"))
def scheduler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with target("scheduler", request.param, tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.fixture(scope="module", params=kinds("router"))
def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    extra = "[scheduler]\ncount = 2"
    with target("router", request.param, tmp_path_factory.mktemp("c"), extra) as made:
        yield made


@pytest.fixture(scope="module", params=kinds("tokenizer"))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with target("tokenizer", request.param, tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.fixture(scope="module", params=kinds("executor"))
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with target("executor", request.param, tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.fixture(scope="module", params=kinds("gateway"))
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with target("gateway", request.param, tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.fixture(scope="module", params=kinds("kvstore"))
def kvstore(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("c")
    extra = (
        f'[kvstore]\ncount = 1\nshared_dir = "{folder}/shared"\n'
        "memory_bytes = 8388608\ndisk_bytes = 33554432\nrecord_bytes = 1048576"
    )
    with target("kvstore", request.param, folder, extra) as made:
        yield made


LISTENERS = [
    (service, kind)
    for service in ("scheduler", "router", "tokenizer", "kvstore")
    for kind in kinds(service)
]


@pytest.fixture(scope="module", params=LISTENERS, ids=lambda pair: "-".join(pair))
def listener(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Target]]:
    """A service that others dial, and its name."""
    service, kind = request.param
    with target(service, kind, tmp_path_factory.mktemp("c")) as made:
        yield service, made
