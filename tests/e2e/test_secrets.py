"""A mesh with marked secrets: none of them is in anything that comes out of it."""

import re
import stat
import sys
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import psutil
import pytest

from deepmesh.key_folder import make_keys
from deepmesh.processes import Command
from deepmesh.supervisor import Mesh
from tests.services.test_encrypted_mesh import PROCESSES, ROOT, free_ports

KEY, WRONG = "sk-marked-0123456789abcdef", "sk-marked-wrong-0123456789"
ADMIN = "sk-marked-admin-0123456789"
REDIS, COLLECTOR = "marked-redis-password", "marked-collector-token"
PROMPT = "marked-prompt-of-a-client"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}


class Marked:
    """The mesh, and what it must not tell."""

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        self.mesh, self.folder = mesh, folder
        files = (folder / "keys").rglob("keys.toml")
        self.curve = [tomllib.loads(path.read_text())["secret"] for path in files]
        self.secrets = [KEY, WRONG, ADMIN, REDIS, COLLECTOR, *self.curve]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    folder = tmp_path_factory.mktemp("s")
    make_keys(folder / "keys")
    services = ("tokenizer", "router", "scheduler", "kvstore")
    gateway, admin, dead, *ports = free_ports(7)
    extra = {
        "router": "count = 1\n",
        "kvstore": "count = 1\nmemory_bytes = 1048576\n"
        f'redis_url = "redis://user:{REDIS}@127.0.0.1:{dead}/0"\n',
    }
    text = (
        f'[mesh]\nname = "marked"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        f'log_level = "debug"\n[links]\nkeys = "keys"\n[gateway]\nport = {gateway}\n'
        f'api_keys = ["{sha256(KEY.encode()).hexdigest()}"]\nadmin_port = {admin}\n'
        f'admin_keys = ["{sha256(ADMIN.encode()).hexdigest()}"]\n[executor]\nkind = "fake"\n'
    )
    for service, port in zip(services, ports, strict=True):
        text += f'[{service}]\naddress = "tcp://127.0.0.1:{port}"\n{extra.get(service, "")}'
    path = folder / "mesh.toml"
    path.write_text(text)
    commands = [
        Command(name, service := name.partition("-")[0], _argv(service, path, options))
        for name, options in PROCESSES.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{dead}")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {COLLECTOR}")
        with Mesh(path, commands=commands) as mesh:
            yield Marked(mesh, folder)


def _argv(service: str, path: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", f"services.{service}", "--config", str(path), *options]


def test_no_secret_comes_out(marked: Marked) -> None:
    answers: list[httpx.Response] = []
    with httpx.Client(base_url=marked.mesh.url, timeout=30) as client:

        def ask(method: str, path: str, key: str, **more: object) -> httpx.Response:
            bearer = {"authorization": f"Bearer {key}"}
            answers.append(client.request(method, path, headers=bearer, **more))  # type: ignore[arg-type]
            return answers[-1]

        assert ask("POST", "/v1/chat/completions", KEY, json=CHAT).status_code == 200
        assert ask("POST", "/v1/chat/completions", WRONG, json=CHAT).status_code == 401
        assert ask("POST", "/v1/chat/completions", KEY, json={**CHAT, "n": 0}).status_code == 400
        assert ask("GET", "/v1/models", WRONG).status_code == 401
        for path in ("/metrics", "/ui/", "/openapi.json", "/ready", "/ui/api/history"):
            assert ask("GET", path, KEY).status_code == 200
        assert ask("GET", "/ui/api/timeline?last=5", KEY).status_code == 200
        (admin,) = (marked.folder / "run").glob("gateway*.admin")
        for key, status in ((ADMIN, 200), (KEY, 401)):
            url = f"{admin.read_text().strip()}/admin/status"
            answers.append(httpx.get(url, headers={"x-api-key": key}, timeout=30))
            assert answers[-1].status_code == status
    told = {f"answer of {a.request.url.path}": a.content + str(a.headers).encode() for a in answers}
    for process in psutil.Process().children(recursive=True):
        told[f"arguments of {process.pid}"] = "\0".join(process.cmdline()).encode()
    for path in (marked.folder / "run").rglob("*"):
        if path.is_file():
            told[str(path)] = path.read_bytes()
    assert any(re.search(r"/logs/", name) for name in told), "the logs are among it"
    assert any(re.search(r"/traces/", name) for name in told), "the traces are among it"
    own = str(marked.folder / "run" / "mesh.toml")  # the configuration, for its processes alone
    for name, content in told.items():
        found = [secret for secret in marked.secrets if secret.encode() in content and name != own]
        assert found == [], f"{name} tells {found}"
        is_answer = name.startswith("answer of /v1/")
        assert is_answer or PROMPT.encode() not in content, f"{name} tells the prompt"


def test_what_holds_secrets_is_for_its_owner_alone(marked: Marked) -> None:
    run = marked.folder / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    holds = [
        path for path in run.rglob("*") if path.is_file() and REDIS in path.read_text("latin-1")
    ]
    holds += list((marked.folder / "keys").rglob("keys.toml"))
    assert holds
    for path in holds:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
