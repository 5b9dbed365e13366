"""The web page: its files, their policy, and that it names nobody but its own gateway."""

import re
from collections.abc import Iterator

import pytest

from services.gateway import pages
from tests.services.gateway_harness import Mesh, running_mesh

KEY_DIGEST = "a" * 64
NAMED = re.compile(r"""(?:src|href)="([^"]+)"|from "([^"]+)"|import\("([^"]+)"\)""")
FOREIGN = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""")
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("ui"), api_keys=[KEY_DIGEST]) as mesh:
        yield mesh


def test_the_page_comes_without_a_key_and_under_a_policy(mesh: Mesh) -> None:
    response, body = mesh.get("/ui/")
    assert response.status == 200
    assert b"<title>deepmesh</title>" in body
    policy = response.getheader("content-security-policy", "")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.getheader("x-content-type-options") == "nosniff"


def test_ui_without_a_slash_leads_there_whatever_path_a_proxy_adds(mesh: Mesh) -> None:
    response, _ = mesh.get("/ui")
    assert (response.status, response.getheader("location")) == (307, "ui/")


def test_every_file_that_a_page_names_is_served_with_its_type(mesh: Mesh) -> None:
    wanted, seen = [pages.INDEX], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        response, body = mesh.get(f"/ui/{name}")
        assert response.status == 200, name
        suffix = "." + name.rpartition(".")[2]
        assert response.getheader("content-type") == pages.TYPES[suffix]
        for groups in NAMED.findall(body.decode()):
            target = next(filter(None, groups))
            if not target.startswith("#"):
                wanted.append(target.removeprefix("./"))
    assert seen == set(pages.read_pages()), "files that no page names"


@pytest.mark.parametrize("name", sorted(pages.read_pages()))
def test_no_file_names_another_host_or_makes_markup_of_text(name: str) -> None:
    text = pages.read_pages()[name].body.decode().replace(NAMESPACE, "")
    assert FOREIGN.findall(text) == []
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert forbidden not in text
    if name.endswith(".html"):
        assert "style=" not in text
        assert not re.search(r"\son\w+=", text)


def test_a_file_that_did_not_change_is_not_sent_again(mesh: Mesh) -> None:
    first, _ = mesh.get("/ui/main.js")
    tag = first.getheader("etag", "")
    second, body = mesh.get("/ui/main.js", {"if-none-match": tag})
    assert (second.status, body) == (304, b"")
    changed, _ = mesh.get("/ui/main.js", {"if-none-match": '"other"'})
    assert changed.status == 200


@pytest.mark.parametrize("path", ["/ui/none.js", "/ui/..%2fapp.py", "/ui/%2e%2e/app.py"])
def test_nothing_else_is_served(mesh: Mesh, path: str) -> None:
    response, body = mesh.get(path)
    assert response.status == 404
    assert b"import" not in body
