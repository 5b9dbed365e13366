"""mesh.toml: defaults work, mistakes are named by their key."""

from pathlib import Path

import pytest

from deepmesh.config import ConfigError, load_config


def test_defaults_need_no_file() -> None:
    config = load_config(None)
    assert config.served_model == "tiny"
    assert Path(config.mesh.model).is_absolute()
    assert config.tokenizer_address(0).startswith("ipc://")


def test_the_model_path_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text('[mesh]\nmodel = "m/x"\nserved_model = "chat"\n')
    config = load_config(tmp_path / "mesh.toml")
    assert config.mesh.model == str(tmp_path / "m" / "x")
    assert config.served_model == "chat"


@pytest.mark.parametrize("text", ["", "[gateway]\nport = 0\n", '[mesh]\nmodel = ""\n'])
def test_without_a_model_it_is_the_one_that_ships_wherever_the_file_lies(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "mesh.toml").write_text(text)
    config = load_config(tmp_path / "mesh.toml")
    assert config.mesh.model == load_config(None).mesh.model
    assert (Path(config.mesh.model) / "config.json").is_file()
    assert config.served_model == "tiny"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway]\nporrt = 1\n", ["[gateway] has no key `porrt`", "did you mean `port`?"]),
        ("[gateway]\nmax_rows = 8\n", ["[gateway]", "`max_rows` is a key of [scheduler]"]),
        ("[gateway]\nxyz = 8\n", ["it may have host, port, count"]),
        ("[gatewy]\nport = 8\n", ["[gatewy] is no section; did you mean `gateway`?"]),
        ("max_waiting = 8\n", ["`max_waiting` is a key of [scheduler]"]),
        ("[telemetry]\nresume_bits = 8\n", ["`resume_bits`; did you mean `gateway.resume_bytes`?"]),
        ("[gateway]\nport = 'x'\n", ["gateway.port: expected an integer, got a string"]),
        ("[mesh]\nlog_level = 'loud'\n", ["mesh.log_level: 'loud' is none of 'debug', 'info'"]),
        ("gateway = 8\n", ["gateway: expected a table, got an integer"]),
        ("[gateway]\napi_keys = 'x'\n", ["gateway.api_keys: expected a list, got a string"]),
        ("[gateway]\nallowed_origins = ['chat.example/']\n", ["gateway.allowed_origins", "https"]),
        ("[gateway]\ncount = 9\nport = 65530\n", ["gateway.port: 65530 + 8"]),
        ("[gateway]\nport = 70000\n", ["gateway.port", "65535"]),
        ("[scheduler]\ndepth = 4\n", ["scheduler.depth"]),
        ("[executor]\ndevice = 'tpu'\n", ["executor.device"]),
        ("[scheduler]\nroles = ['decode']\n", ["scheduler.roles", "router"]),
        ("[scheduler]\ncount = 2\nroles = ['both']\n", ["scheduler.roles", "1 roles for 2"]),
        (
            "[router]\ncount = 1\n[scheduler]\ncount = 2\nroles = ['decode', 'decode']\n",
            ["scheduler.roles", '"prefill"'],
        ),
        ("[scheduler]\nroles = ['tutti']\n", ["scheduler.roles", "'prefill', 'decode', 'both'"]),
        (
            "[router]\ncount = 1\n[scheduler]\ncount = 2\nroles = ['prefill', 'decode']\n"
            "[executor]\nhandover_address = 'tcp://127.0.0.1:7100'\n",
            ["executor.handover_address", "{index}"],
        ),
        ("[links]\nheartbeat_s = 5\ntimeout_s = 6\n", ["links.timeout_s"]),
        ("[gateway]\napi_keys = ['secret']\n", ["gateway.api_keys", "SHA-256"]),
        ("[mesh]\nrun_dir = '/" + "d" * 100 + "'\n", ["mesh.run_dir", "107"]),
        ("[gateway]\nkeepalive_s = 0\n", ["gateway.keepalive_s"]),
        ("[tokenizer]\nunacked_events = 0\n", ["tokenizer.unacked_events", "64"]),
        ("[scheduler]\ndeadline_s = nan\n", ["scheduler.deadline_s"]),
        ("[executor]\nglobal_blocks = -1\n", ["executor.global_blocks"]),
        ("[nonsense]\n", ["nonsense"]),
        ("not toml", ["mesh.toml"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_peers_with_another_configuration_have_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("")
    one = load_config(path).digest()
    path.write_text("[scheduler]\ndepth = 1\n")
    assert load_config(path).digest() != one


def test_a_router_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[scheduler]\ncount = 2\n")
    assert load_config(path).router_address == ""
    path.write_text("[router]\ncount = 1\n")
    assert load_config(path).router_address.endswith("/router-0.sock")
    path.write_text('[router]\naddress = "tcp://127.0.0.1:7200"\n')
    assert load_config(path).router_address == "tcp://127.0.0.1:7200"


def test_an_external_address_may_number_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[scheduler]\ncount = 2\naddress = "tcp://127.0.0.1:710{index}"\n')
    config = load_config(path)
    assert config.scheduler_address(0) == "tcp://127.0.0.1:7100"
    assert config.scheduler_address(1) == "tcp://127.0.0.1:7101"


def test_an_address_of_a_kvstore_means_that_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[kvstore]\naddress = "tcp://127.0.0.1:7300"\n')
    assert load_config(path).kvstore.count == 1
    path.write_text('[kvstore]\naddress = "tcp://127.0.0.1:730{index}"\ncount = 2\n')
    assert load_config(path).kvstore.count == 2


def test_groups_have_the_roles_that_the_file_gives_them(tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text(
        "[router]\ncount = 1\n[scheduler]\ncount = 2\nroles = ['prefill', 'decode']\n"
    )
    config = load_config(tmp_path / "mesh.toml")
    assert [config.role(0), config.role(1)] == ["prefill", "decode"]
    assert load_config(None).role(0) == "both"
    assert [config.prefillers(0), config.prefillers(1)] == [[], [0]]
    assert load_config(None).prefillers(0) == []
