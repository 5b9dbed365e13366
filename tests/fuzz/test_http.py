"""Hostile requests to the real gateway and tokenizer: refused or served soon, and it serves on."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.edge import Edge, edge

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
SOON_S = 1.0  # of CPU time: other processes have their share of the machine
MEMORY_KB = 600 << 10


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": [HI], "max_tokens": 1, **fields}).encode()


def deep(opening: str, inner: str, closing: str, depth: int) -> bytes:
    return body(metadata="@").replace(b'"@"', f"{opening * depth}{inner}{closing * depth}".encode())


def chain(count: int) -> dict[str, object]:
    """A schema whose references lead ever deeper: an engine that follows them overran its stack."""
    defs = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{count}": True}}


def schema(of: object) -> bytes:
    return body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": of}})


def tools(count: int) -> bytes:
    made = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    return body(
        tools=[{"type": "function", "function": {**made, "name": f"f{i}"}} for i in range(count)]
    )


def rules(count: int) -> str:
    return "start: x0\n" + "".join(f"x{i}: x{i + 1}\n" for i in range(count)) + f'x{count}: "a"\n'


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
DATA = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
BAD: dict[str, bytes] = {
    "deep arrays": deep("[", "1", "]", 200_000),
    "deep objects": deep('{"a":', "1", "}", 100_000),
    "unclosed": b"[" * 1_000_000,
    "a number of a million digits": deep("", "9" * 1_000_000, "", 1),
    "seed of 400 digits": body(seed="@").replace(b'"@"', b"9" * 400),
    "temperature 1e999": body(temperature="@").replace(b'"@"', b"1e999"),
    "NaN": body(temperature="@").replace(b'"@"', b"NaN"),
    "half a surrogate pair": body(user="@").replace(b"@", rb"\ud800") + b" ",
    "invalid UTF-8": body(user="@").replace(b"@", b"\xff\xfe"),
    "NUL in the model": body(model="tiny\0"),
    "a model of a megabyte": body(model="m" * 1_000_000),
    "a field of a megabyte": body(**{"f" * 1_000_000: 1}),
    "a bias of 5000 digits": body(logit_bias={"9" * 5000: 1}),
    "stop strings": body(stop=["s"] * 100_000),
    "choices": body(n=10**9),
    "an image by URL": body(messages=[{"role": "user", "content": [IMAGE]}]),
    "an image by path": body(messages=[{"role": "user", "content": [FILE]}]),
    "an image of 3 MB": body(messages=[{"role": "user", "content": [DATA]}]),
    "nested tool results": body(messages=[{"role": "user", "content": [{"content": [1]}]}]),
    "a regex with look-behind": body(guided_regex="(?<=a)b"),
    "the least 64-bit integer": schema({"const": -(2**63)}),
    "the same in Lark": body(guided_grammar=f'start: %json {{"const": {-(2**63)}}}\n'),
    "a chain of references": schema(chain(1400)),
    "a chain of rules": body(guided_grammar=rules(30_000)),
    "a deep schema": schema(json.loads('{"items":' * 500 + "true" + "}" * 500)),
    "a wide schema": schema({"properties": {f"p{i}": {} for i in range(30_000)}}),
    "an endless $ref": schema({"$ref": "https://example.org/schema.json"}),
    "choices of a guide": body(guided_choice=["x" * 100] * 5000),
}
FINE: dict[str, bytes] = {
    "the same key twice": body()[:-1] + b',"max_tokens":1}',
    "astral characters": body(messages=[{"role": "user", "content": "\U0001f600" * 1000}]),
    "tools": tools(64),
    "null fields": body(**dict.fromkeys(("tools", "stop", "seed", "n", "user"))),
}
EITHER: dict[str, bytes] = {  # refused or served: what counts is that it ends
    "a regex that explodes": body(guided_regex="((a{1,1000}){1,1000}){1,1000}"),
    "a regex of 300 kB": body(guided_regex="(a|b)?" * 50_000),
    "a million messages": body(messages=[]).replace(b"[]", b"[" + b"{}," * 1_000_000 + b"{}]"),
    "100,000 good messages": body(messages=[HI] * 100_000),
    "1,000 tools": tools(1000),
    "a bias for every token": body(logit_bias={str(i): 1 for i in range(4000)}),
    "a prompt of 7 MB": body(messages=[{"role": "user", "content": "a " * 3_500_000}]),
    "one word of 7 MB": body(messages=[{"role": "user", "content": "a" * 7_000_000}]),
    "special tokens": body(messages=[{"role": "user", "content": "<｜User｜>" * 20_000}]),
}


def _peak_kb() -> int:
    """Of this process since `_forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


served_at: dict[str, int] = {}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge(tmp_path_factory.mktemp("e")) as made:
        _forget_peak()  # of tests before, in the same process
        served_at["kb"] = _peak_kb()
        yield made


def ask(
    port: int, path: str, content: bytes = b"", method: str = "POST", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request(method, path, content, headers)
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        client.close()


def raw(port: int, content: bytes, limit_s: float = 10.0) -> bytes:
    """What comes back for bytes that no client library would send, until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as sock:
        with contextlib.suppress(OSError):  # reset, or closed already: what was said still counts
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionResetError):  # it did not read what was left
            while part := sock.recv(65536):
                found += part
        return found


@pytest.mark.parametrize("name", [*BAD, *FINE, *EITHER])
def test_every_body_has_an_answer_of_its_client(served: Edge, name: str) -> None:
    content = {**BAD, **FINE, **EITHER}[name]
    began = time.process_time()
    status, headers, answer = ask(served.port, CHAT, content)
    took_s = time.process_time() - began
    assert status in ((200,) if name in FINE else range(200, 500)), answer[:300]
    assert name not in BAD or status >= 400, answer[:300]
    assert took_s < SOON_S, f"{took_s:.2f} s"
    assert len(answer) < 10_000
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-request-id"]


def test_all_of_that_leaves_it_small_and_serving(served: Edge) -> None:
    """Runs behind the bodies above; the tests of one file run in order."""
    assert ask(served.port, CHAT, body())[0] == 200
    assert _peak_kb() - served_at["kb"] < MEMORY_KB


@pytest.mark.parametrize(
    "path",
    [
        "/ui/..%2f..%2fapp.py",
        "/ui/%2e%2e/%2e%2e/etc/passwd",
        "/ui//etc/passwd",
        "/ui/static/../../app.py",
        "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/responses/..%2f..%2fx",
        "/v1/responses/" + "x" * 5000,
        "/v1/responses/resp_1?limit=" + "9" * 5000 + "&after=%00%ff&stream=true",
        "/ui/api/timeline?last=nan",
        "/ui/api/timeline?last=inf&format=chrome",
        "/ui/api/feed?interval=-1",
        "/ui/api/requests/%00",
        "/%ff%fe",
        "/" + "a/" * 10_000,
    ],
)
def test_paths_and_queries_lead_nowhere(served: Edge, path: str) -> None:
    status, headers, answer = ask(served.port, path, method="GET")
    assert 400 <= status < 500
    assert b"root:" not in answer
    assert headers["x-content-type-options"] == "nosniff"


def test_what_no_client_sends_ends_the_connection(served: Edge) -> None:
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    cases = [
        post + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        post + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /x\r\n",
        post + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
        post + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        post + b"content-length: -1\r\n\r\n",
        post + b"content-length: 99999999999999999999999\r\n\r\n",
        post + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
        post + b"".join(b"h%d: v\r\n" % i for i in range(20_000)) + b"\r\n",
        post + b"a b: c\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        b"\0" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    for case in cases:
        answer = raw(served.port, case)
        assert b"HTTP/1.1 5" not in answer, (case[:80], answer[:200])
        assert answer.count(b"HTTP/1.1 ") <= 1, (case[:80], answer)  # no second request within it
    assert ask(served.port, CHAT, body())[0] == 200


def test_a_body_in_drops_holds_up_nobody(served: Edge) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as slow:
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(3):
            slow.sendall(b"1\r\n{\r\n")
            assert ask(served.port, CHAT, body())[0] == 200
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")  # once nothing comes for its time


def test_a_page_whose_name_leads_here_gets_nothing_without_a_key(tmp_path: Path) -> None:
    """DNS rebinding: the name of another site resolves to this host, so its script may ask."""
    with edge(tmp_path) as made:
        status, headers, _ = ask(made.port, "/v1/models", method="GET", Host="evil.example:8000")
        assert status == 403
        assert headers["access-control-allow-origin"] is None
        for name in ("localhost", "127.0.0.1:9", "[::1]:8000"):
            assert ask(made.port, "/health", method="GET", Host=name)[0] == 200
