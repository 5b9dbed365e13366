"""Pages of other origins: none may call the API unless the configuration names them."""

from pathlib import Path

import pytest

from tests.services.gateway_harness import running_mesh

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", [[PAGE, "http://localhost:3000"], ["*"]])
def test_a_page_that_may_asks_first_and_reads_the_answer(
    tmp_path: Path, allowed: list[str]
) -> None:
    with running_mesh(tmp_path, allowed_origins=allowed, api_keys=["0" * 64]) as mesh:
        asked, _ = mesh.get("/v1/chat/completions", method="OPTIONS", headers=PREFLIGHT)
        assert asked.status == 204
        origin = "*" if allowed == ["*"] else PAGE
        assert asked.getheader("access-control-allow-origin") == origin
        assert "POST" in (asked.getheader("access-control-allow-methods") or "")
        allowed_headers = asked.getheader("access-control-allow-headers")
        assert allowed_headers == PREFLIGHT["Access-Control-Request-Headers"]
        for path, status in (("/health", 200), ("/v1/models", 401), ("/nowhere", 404)):
            answer, _ = mesh.get(path, headers={"Origin": PAGE})
            assert answer.status == status
            assert answer.getheader("access-control-allow-origin") == origin
            assert "x-request-id" in (answer.getheader("access-control-expose-headers") or "")
            assert (answer.getheader("vary") == "origin") == (allowed != ["*"])


@pytest.mark.parametrize("allowed", [[], ["https://other.example"]])
def test_a_page_that_may_not_gets_no_word_of_it(tmp_path: Path, allowed: list[str]) -> None:
    with running_mesh(tmp_path, allowed_origins=allowed) as mesh:
        for method, headers in (("OPTIONS", PREFLIGHT), ("GET", {"Origin": PAGE})):
            answer, _ = mesh.get("/health", method=method, headers=headers)
            assert not [name for name, _ in answer.getheaders() if "access-control" in name]


def test_who_is_no_page_gets_none_of_it(tmp_path: Path) -> None:
    with running_mesh(tmp_path, allowed_origins=["*"]) as mesh:
        answer, _ = mesh.get("/health")
        assert not [name for name, _ in answer.getheaders() if "access-control" in name]
