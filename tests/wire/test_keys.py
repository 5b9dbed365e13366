"""Key folders: made once, completed, replaced, retired; damage is named."""

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.config import ConfigError, load_config
from deepmesh.key_folder import SERVICES, KeyFolderError, make_keys
from deepmesh.wire.keys import DIALS, KeysError, load_keyring, read_key_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert make_keys(tmp_path / "keys") == list(SERVICES)
    return tmp_path / "keys"


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_each_service_gets_its_own_secret_and_everybodys_public_key(folder: Path) -> None:
    files = [read_key_file(folder, service) for service in SERVICES]
    assert len({file.secret for file in files}) == len(SERVICES)
    assert all(file.public == files[0].public for file in files)
    assert modes(folder) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o700}
    for service in SERVICES:
        text = (folder / service / "keys.toml").read_text()
        others = [file.secret for file in files if file.service != service]
        assert not any(secret in text for secret in others)


def test_asked_again_it_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.toml")}
    assert make_keys(folder) == []
    assert {path: path.read_bytes() for path in folder.rglob("*.toml")} == before


def test_a_lost_file_is_replaced_and_everyone_learns_of_it(folder: Path) -> None:
    (folder / "router" / "keys.toml").unlink()
    assert make_keys(folder) == ["router"]
    keys = read_key_file(folder, "gateway").public["router"]
    assert len(keys) == 2  # the lost one is listed until it is retired
    assert read_key_file(folder, "router").public["router"] == keys


def test_a_new_pair_stands_before_the_old_until_that_is_retired(folder: Path) -> None:
    old = read_key_file(folder, "tokenizer")
    assert make_keys(folder, rotate=["tokenizer"]) == ["tokenizer"]
    new = read_key_file(folder, "tokenizer")
    assert new.secret != old.secret
    assert new.public["tokenizer"][1:] == old.public["tokenizer"]
    assert make_keys(folder, retire=True) == []
    assert read_key_file(folder, "scheduler").public["tokenizer"] == new.public["tokenizer"][:1]
    assert read_key_file(folder, "tokenizer").secret == new.secret
    assert modes(folder) == {0o600}


def test_the_lists_must_agree(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    (tmp_path / "other" / "router" / "keys.toml").replace(folder / "router" / "keys.toml")
    with pytest.raises(KeyFolderError, match="differ"):
        make_keys(folder)


def test_a_process_needs_only_the_folder_of_its_service(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(
        '[links]\nkeys = "keys"\n[scheduler]\ncount = 2\naddress = "tcp://10.0.0.{index}:7100"\n'
        '[tokenizer]\naddress = "tcp://10.0.1.1:7100"\n'
    )
    for service in set(SERVICES) - {"tokenizer"}:
        (folder / service / "keys.toml").unlink()
    ring = load_keyring(load_config(path), "tokenizer")
    assert ring is not None
    assert set(ring.clients.values()) == {"gateway"}
    assert set(ring.servers) == {"tcp://10.0.0.0:7100", "tcp://10.0.0.1:7100"}
    with pytest.raises(KeysError, match=r"router/keys\.toml: No such file.*deepmesh keys --mesh"):
        load_keyring(load_config(path), "router")


def test_without_links_keys_there_are_none(tmp_path: Path) -> None:
    assert load_keyring(load_config(None), "tokenizer") is None


def test_every_service_that_is_dialled_and_dials_has_keys() -> None:
    assert set(DIALS) == set(SERVICES)
    assert {at for dialled in DIALS.values() for at in dialled} <= set(SERVICES)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace('service = "router"', 'service = "gateway"'), "not the keys"),
        (lambda text: text.replace("secret", "sekret"), "keys.toml"),
        (lambda text: text.replace('secret = "', 'secret = "~'), "40 characters"),
        (lambda text: text.replace('router = ["', 'router = ["' + "#" * 40 + '", "'), "Z85"),
        (lambda text: text + "\x00", "keys.toml"),
        (lambda text: "", "keys.toml"),
    ],
)
def test_damage_is_named(folder: Path, damage: object, words: str) -> None:
    path = folder / "router" / "keys.toml"
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    with pytest.raises(KeysError, match=words):
        read_key_file(folder, "router")
    with pytest.raises(KeyFolderError):
        make_keys(folder)


def test_a_file_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "router" / "keys.toml").chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        read_key_file(folder, "router")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[scheduler]\naddress = "tcp://10.0.0.1:7100"\n', ["scheduler.address", "loopback"]),
        ('[tokenizer]\naddress = "tcp://mesh:7100"\n', ["tokenizer.address", "links.keys"]),
        ('[router]\naddress = "tcp://0.0.0.0:7100"\n', ["router.address", "loopback"]),
        ('[kvstore]\naddress = "udp://127.0.0.1:7100"\n', ["kvstore.address", "tcp://"]),
        ('[kvstore]\naddress = "tcp://127.0.0.1"\n', ["kvstore.address", "HOST:PORT"]),
        ('[scheduler]\naddress = "ipc://' + "d" * 120 + '"\n', ["scheduler.address", "107"]),
        ('[links]\nbind = "eth0"\n', ["links.bind"]),
    ],
)
def test_addresses_that_cannot_be_are_named_by_their_key(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    for word in words:
        assert word in str(error.value)


def test_the_command_makes_replaces_and_retires(tmp_path: Path) -> None:
    run, folder = CliRunner(), str(tmp_path / "mesh keys")
    first = run.invoke(app, ["keys", "--mesh", folder])
    assert first.exit_code == 0
    assert f'keys = "{folder}"' in first.output
    assert "new keys of gateway, tokenizer, router" in first.output
    assert "no new key" in run.invoke(app, ["keys", "--mesh", folder]).output
    both = run.invoke(app, ["keys", "--mesh", folder, "--rotate", "router", "--rotate", "kvstore"])
    assert "new keys of router, kvstore" in both.output
    assert len(read_key_file(Path(folder), "gateway").public["router"]) == 2
    assert run.invoke(app, ["keys", "--mesh", folder, "--retire"]).exit_code == 0
    assert len(read_key_file(Path(folder), "gateway").public["router"]) == 1
    assert run.invoke(app, ["keys", "--retire"]).exit_code == 2  # of which mesh?
    assert run.invoke(app, ["keys", "--mesh", folder, "--rotate", "baker"]).exit_code == 2
