"""mesh.toml -> one frozen struct per service, checked; errors name the key's path."""

import hashlib
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from deepmesh.addresses import check_address
from deepmesh.config_words import words

MIN_DISK_BYTES = 16 << 20
_ROOT = Path(__file__).resolve().parents[1]
SHIPPED_MODEL = _ROOT / "models/tiny"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the tables of mesh.toml: unknown keys are errors."""


class MeshConfig(Section, frozen=True):
    """[mesh]: what all processes share."""

    name: str = "local"
    run_dir: str = ""  # sockets, traces, logs; empty: deepmesh-NAME-UID in the temporary folder
    model: str = ""  # folder of the checkpoint; relative to mesh.toml; empty: the one that ships
    served_model: str = ""  # name clients use; empty: the folder's name
    aliases: list[str] = []  # further names that clients may use
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class LinksConfig(Section, frozen=True):
    """[links]: all message links."""

    heartbeat_s: float = 1.0
    timeout_s: float = 5.0  # a peer silent for longer is lost
    max_outbox: int = 20_000  # messages; beyond it the peer is lost
    keys: str = (
        ""  # folder of `deepmesh keys --mesh`: tcp is encrypted; empty: tcp on loopback only
    )
    bind: str = ""  # where tcp listeners bind: 0.0.0.0, an IP; empty: the host of their address


class GatewayConfig(Section, frozen=True):
    """[gateway]: the HTTP edge."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    count: int = 1  # processes, at `port` and the ports behind it; each grants its share of a key
    api_keys: list[str] = []  # SHA-256 hex digests; empty: no key is asked for
    max_body_bytes: int = 8 << 20
    max_requests: int = 1024  # open at once; beyond it 429
    key_max_requests: int = 0  # of them, of one API key; 0: no limit of its own
    key_requests_per_minute: int = 0  # of one API key; 0: no limit
    key_tokens_per_minute: int = 0  # prompts and answers; known, and counted, at the end of each
    key_priorities: dict[str, int] = {}  # digest of a key: above 0 goes before others, below after
    allowed_origins: list[str] = []  # of web pages that may call the API from a browser; "*": all
    admin_port: int = -1  # -1: none; 0: any free port
    admin_host: str = "127.0.0.1"
    admin_keys: list[str] = []  # SHA-256 hex digests; the admin port needs one
    keepalive_s: float = 10.0  # comment line on an idle stream
    resume_bytes: int = 64 << 20  # raw bodies kept for re-submission
    deadline_s: float = 120.0  # without progress; then 503
    address: str = ""  # set: an external gateway runs there, `up` starts none


class TokenizerConfig(Section, frozen=True):
    """[tokenizer]: the recipe processes."""

    count: int = 1
    address: str = ""  # empty: ipc in the run folder; set: an external one
    thinking_sampling: Literal["honour", "deepseek"] = "honour"
    default_thinking: bool = True
    default_max_tokens: int = 0  # 0: the rest of the context
    max_stops: int = 16
    unacked_events: int = 2048  # a reader further behind stops its own request
    slow_consumer_s: float = 60.0
    response_ttl_s: float = 86_400.0  # stored responses; they need a kvstore
    max_background: int = 256  # background responses of a process that are not over; beyond it 429


class RouterConfig(Section, frozen=True):
    """[router]: spreads new requests over scheduler replicas."""

    count: int = 0  # 0: tokenizers choose a replica themselves; 1: a router does
    address: str = ""  # set: an external one, used whatever `count` says; `up` starts none


class SchedulerConfig(Section, frozen=True):
    """[scheduler]: one process per EP group."""

    count: int = 1  # replicas
    address: str = ""
    depth: Literal[1, 2, 3] = 2
    max_rows: int = 64  # requests resident at once
    max_waiting: int = 4096
    step_tokens: int = 1024  # tokens a step may compute
    chunk_tokens: int = 512  # whole multiples of the executor's chunk_align
    hold_steps: int = 1  # group steps that a lone prefill waits for prefill of other ranks
    decode_itl_ms: float = 100.0  # between tokens of one request, while others prefill
    prefill_share: float = 0.1  # of a step with decode rows, where its costs are known; 1: no bound
    max_model_len: int = 0  # 0: what the executor can hold
    orphan_s: float = 10.0
    deadline_s: float = 120.0
    hang_s: float = 10.0  # a step without a result for so long, and for 10 slow steps, hangs
    audit: bool = False  # check all invariants after every event
    prefix_cache: bool = True
    store_lookup_s: float = 0.05  # a request waits so long for what a kvstore says of its prompt
    store_load_s: float = 2.0  # and so long for its blocks; then it computes them


class ExecutorConfig(Section, frozen=True):
    """[executor]: one process per device."""

    kind: Literal["model", "fake"] = "model"
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 1
    address: str = ""
    threads: int = 1
    numerics: Literal["exact", "fp32", "bf16"] = "bf16"
    global_blocks: int = 0  # 0: by memory, see `deepmesh model inspect`
    window_blocks: int = 0
    slots: int = 0  # 0: scheduler.max_rows + room for fences
    max_queued: int = 64  # steps that may wait for the device; a scheduler sends `depth` of them
    masks: bool = True  # a mask worker beside each executor keeps outputs to grammars
    mask_wait_ms: float = 5.0  # sampling waits so long for masks; a row without one sits out a step
    grammar_compile_s: float = 5.0  # a grammar that takes longer fails its request
    grammar_cache: int = 256  # compiled grammars that are kept
    grammar_threads: int = 1  # that compile
    # Of a device that takes its time, for tests and benchmarks:
    fake_step_ms: float = 0.0  # kind = "fake": from the begin of a step to its tokens
    fake_tail_ms: float = 0.0  # from there to the end of the step
    fake_draft_len: int = 0  # drafts that each decode row verifies
    fake_mask_ms: float = -1.0  # until the mask behind a token is there; negative: no grammars
    fake_hang_step: int = 0  # the device never ends this step of the process; 0: it never hangs
    # Where the ranks of a group meet. Empty: in the run folder, on one machine. "tcp://HOST:PORT":
    # rank 0 listens there, on a private network; {index} is the number of the scheduler.
    group_address: str = ""


class TelemetryConfig(Section, frozen=True):
    """[telemetry]: traces. The standard OTEL_EXPORTER_OTLP_* variables add an exporter."""

    enabled: bool = True
    file: bool = True  # JSON lines in RUN_DIR/traces
    sample_ratio: float = 1.0


class SupervisorConfig(Section, frozen=True):
    """[supervisor]: `deepmesh up`."""

    start_timeout_s: float = 120.0  # without being further with loading; then `up` gives up
    restart: bool = True
    backoff_s: float = 0.2  # doubles up to 5 s
    stop_timeout_s: float = 10.0
    hang_s: float = 10.0  # a ready process whose loop stands still for so long is killed; 0: never


class KvstoreConfig(Section, frozen=True):
    """[kvstore]: KV blocks off the device, and small records."""

    count: int = 0  # processes; 0: none
    address: str = ""  # set: external ones, `count` of them but at least one; `up` starts none
    memory_bytes: int = 1 << 30  # 0: no memory tier
    disk_bytes: int = 0  # 0: no disk tier, records do not outlive the process
    disk_dir: str = ""  # empty: in the run folder; each process has a folder of its own below it
    record_bytes: int = 64 << 20
    shared_dir: str = ""  # files that executors map; empty: below /dev/shm; "off": none


class Config(Section, frozen=True):
    """The whole of mesh.toml."""

    mesh: MeshConfig = MeshConfig()
    links: LinksConfig = LinksConfig()
    gateway: GatewayConfig = GatewayConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    kvstore: KvstoreConfig = KvstoreConfig()
    router: RouterConfig = RouterConfig()

    @property
    def served_model(self) -> str:
        """The name clients use for the model."""
        return self.mesh.served_model or Path(self.mesh.model or SHIPPED_MODEL).name

    def tokenizer_address(self, index: int) -> str:
        """Where tokenizer `index` listens."""
        return self._at(self.tokenizer.address, "tokenizer", index)

    @property
    def router_address(self) -> str:
        """Where the router listens for tokenizers; empty without one."""
        return self.router.address or (self._ipc("router-0") if self.router.count else "")

    def scheduler_address(self, index: int) -> str:
        """Where scheduler `index` listens, for tokenizers and executors alike."""
        return self._at(self.scheduler.address, "scheduler", index)

    def group_address(self, index: int) -> str:
        """Where the executors of scheduler `index` meet: tcp://HOST:PORT, or a path's beginning."""
        external = self.executor.group_address.replace("{index}", str(index))
        return external or f"{self.mesh.run_dir}/group-{index}"

    def kvstore_address(self, index: int) -> str:
        """Where kvstore `index` listens, for schedulers, executors and tokenizers."""
        return self._at(self.kvstore.address, "kvstore", index)

    def kvstore_disk_dir(self, index: int) -> Path:
        """Folder of the disk tier of kvstore `index`."""
        return Path(self.kvstore.disk_dir or f"{self.mesh.run_dir}/kvstore") / str(index)

    @property
    def shared_dir(self) -> Path | None:
        """Folder of the files that processes of one machine map; kvstores make and remove it."""
        if self.kvstore.shared_dir:
            return Path(self.kvstore.shared_dir) if self.kvstore.shared_dir != "off" else None
        where = hashlib.sha256(self.mesh.run_dir.encode()).hexdigest()[:8]
        return Path("/dev/shm") / f"deepmesh-{self.mesh.name}-{where}"

    def services_by_address(self) -> dict[str, str]:
        """What listens where, but for gateways."""
        found = {self.tokenizer_address(i): "tokenizer" for i in range(self.tokenizer.count)}
        found |= {self.scheduler_address(i): "scheduler" for i in range(self.scheduler.count)}
        found |= {self.kvstore_address(i): "kvstore" for i in range(self.kvstore.count)}
        if self.router_address:
            found[self.router_address] = "router"
        return found

    def _at(self, address: str, service: str, index: int) -> str:
        """`{index}` in an external address becomes the number of the process."""
        return address.replace("{index}", str(index)) or self._ipc(f"{service}-{index}")

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.mesh.run_dir}/{name}.sock"

    def digest(self) -> str:
        """Hash of everything that peers must agree on; travels in `Hello`."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class ConfigError(ValueError):
    """mesh.toml is wrong; the text names the key."""


def load_config(path: Path | None) -> Config:
    """Read and check mesh.toml; without a path, the defaults with the model that ships.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; names the key's path.
    """
    data: dict[str, object] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: {error}") from error
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {words(str(error), Config)}") from error
    _check(config)
    return _resolve(config, path)


def _resolve(config: Config, path: Path | None) -> Config:
    base = path.resolve().parent if path is not None else _ROOT
    mesh = config.mesh
    run_dir = mesh.run_dir or f"{tempfile.gettempdir()}/deepmesh-{mesh.name}-{os.getuid()}"
    longest = f"{run_dir}/tokenizer-999.sock"
    if len(longest.encode()) > 107:
        raise ConfigError(f"mesh.run_dir: {run_dir!r} is too long for a unix socket (107 bytes)")
    model = str((base / (mesh.model or SHIPPED_MODEL)).resolve())
    mesh = msgspec.structs.replace(mesh, run_dir=run_dir, model=model)
    kvstore = config.kvstore
    if kvstore.address:
        kvstore = msgspec.structs.replace(kvstore, count=max(kvstore.count, 1))
    if kvstore.disk_dir:
        kvstore = msgspec.structs.replace(
            kvstore, disk_dir=str((base / kvstore.disk_dir).resolve())
        )
    links = config.links
    if links.keys:
        links = msgspec.structs.replace(links, keys=str((base / links.keys).resolve()))
    return msgspec.structs.replace(config, mesh=mesh, kvstore=kvstore, links=links)


def _check(config: Config) -> None:
    """Values that types cannot say."""
    limits = {
        "gateway.port": (config.gateway.port, 0, 65535),
        "gateway.count": (config.gateway.count, 1, 64),
        "gateway.max_body_bytes": (config.gateway.max_body_bytes, 1024, 1 << 30),
        "gateway.max_requests": (config.gateway.max_requests, 1, 100_000),
        "gateway.key_max_requests": (config.gateway.key_max_requests, 0, 100_000),
        "gateway.key_requests_per_minute": (config.gateway.key_requests_per_minute, 0, 1 << 30),
        "gateway.key_tokens_per_minute": (config.gateway.key_tokens_per_minute, 0, 1 << 40),
        "gateway.admin_port": (config.gateway.admin_port, -1, 65535),
        "gateway.resume_bytes": (config.gateway.resume_bytes, 0, 1 << 40),
        "gateway.keepalive_s": (config.gateway.keepalive_s, 0.05, 86_400),
        "gateway.deadline_s": (config.gateway.deadline_s, 0.1, 86_400),
        "tokenizer.max_stops": (config.tokenizer.max_stops, 0, 1024),
        "tokenizer.default_max_tokens": (config.tokenizer.default_max_tokens, 0, 1 << 30),
        "tokenizer.unacked_events": (config.tokenizer.unacked_events, 64, 1 << 20),
        "tokenizer.slow_consumer_s": (config.tokenizer.slow_consumer_s, 0.1, 86_400),
        "tokenizer.response_ttl_s": (config.tokenizer.response_ttl_s, 1, 366 * 86_400),
        "tokenizer.max_background": (config.tokenizer.max_background, 0, 1 << 16),
        "tokenizer.count": (config.tokenizer.count, 0, 256),
        "router.count": (config.router.count, 0, 1),
        "scheduler.count": (config.scheduler.count, 0, 64),
        "scheduler.max_rows": (config.scheduler.max_rows, 1, 4096),
        "scheduler.step_tokens": (config.scheduler.step_tokens, 1, 1 << 20),
        "scheduler.chunk_tokens": (config.scheduler.chunk_tokens, 1, 1 << 20),
        "scheduler.max_waiting": (config.scheduler.max_waiting, 1, 1 << 20),
        "scheduler.hold_steps": (config.scheduler.hold_steps, 0, 1000),
        "scheduler.decode_itl_ms": (config.scheduler.decode_itl_ms, 0, 3_600_000),
        "scheduler.prefill_share": (config.scheduler.prefill_share, 0, 1),
        "scheduler.max_model_len": (config.scheduler.max_model_len, 0, 1 << 30),
        "scheduler.orphan_s": (config.scheduler.orphan_s, 0, 86_400),
        "scheduler.store_lookup_s": (config.scheduler.store_lookup_s, 0.001, 60),
        "scheduler.store_load_s": (config.scheduler.store_load_s, 0.01, 3600),
        "scheduler.hang_s": (config.scheduler.hang_s, 0.1, 86_400),
        "scheduler.deadline_s": (config.scheduler.deadline_s, 0.1, 86_400),
        "executor.global_blocks": (config.executor.global_blocks, 0, 1 << 30),
        "executor.window_blocks": (config.executor.window_blocks, 0, 1 << 30),
        "executor.slots": (config.executor.slots, 0, 1 << 16),
        "executor.max_queued": (config.executor.max_queued, 3, 1 << 20),
        "executor.mask_wait_ms": (config.executor.mask_wait_ms, 0, 60_000),
        "executor.grammar_compile_s": (config.executor.grammar_compile_s, 0.01, 3600),
        "executor.grammar_cache": (config.executor.grammar_cache, 1, 1 << 20),
        "executor.grammar_threads": (config.executor.grammar_threads, 1, 256),
        "executor.fake_step_ms": (config.executor.fake_step_ms, 0, 60_000),
        "executor.fake_tail_ms": (config.executor.fake_tail_ms, 0, 60_000),
        "executor.fake_draft_len": (config.executor.fake_draft_len, 0, 15),
        "executor.fake_mask_ms": (config.executor.fake_mask_ms, -1, 60_000),
        "executor.fake_hang_step": (config.executor.fake_hang_step, 0, 1 << 62),
        "executor.ranks": (config.executor.ranks, 1, 1024),
        "executor.threads": (config.executor.threads, 1, 1024),
        "links.heartbeat_s": (config.links.heartbeat_s, 0.01, 60),
        "links.timeout_s": (config.links.timeout_s, 2 * config.links.heartbeat_s, 600),
        "links.max_outbox": (config.links.max_outbox, 100, 1 << 24),
        "supervisor.start_timeout_s": (config.supervisor.start_timeout_s, 0.1, 86_400),
        "supervisor.backoff_s": (config.supervisor.backoff_s, 0.01, 60),
        "supervisor.stop_timeout_s": (config.supervisor.stop_timeout_s, 0.1, 3600),
        "supervisor.hang_s": (config.supervisor.hang_s, 0, 3600),
        "kvstore.count": (config.kvstore.count, 0, 64),
        "kvstore.memory_bytes": (config.kvstore.memory_bytes, 0, 1 << 46),
        "kvstore.disk_bytes": (config.kvstore.disk_bytes, 0, 1 << 50),
        "kvstore.record_bytes": (config.kvstore.record_bytes, 1 << 16, 1 << 36),
        "telemetry.sample_ratio": (config.telemetry.sample_ratio, 0.0, 1.0),
    }
    for key, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"{key}: {value} is not between {low} and {high}")
    if 0 < config.kvstore.disk_bytes < MIN_DISK_BYTES:
        raise ConfigError(f"kvstore.disk_bytes: use 0 (off) or at least {MIN_DISK_BYTES}")
    group_address = config.executor.group_address
    if group_address and not re.fullmatch(r"tcp://[^/:\s]+:(\d+|\{index\})+", group_address):
        raise ConfigError(f"executor.group_address: {group_address!r} is not tcp://HOST:PORT")
    if group_address and config.scheduler.count > 1 and "{index}" not in group_address:
        raise ConfigError("executor.group_address: with several schedulers it needs an {index}")
    _check_addresses(config)
    settings = config.gateway
    for name, keys in (
        ("api_keys", settings.api_keys),
        ("admin_keys", settings.admin_keys),
        ("key_priorities", settings.key_priorities),
    ):
        for key in keys:
            if len(key) != 64 or not all(c in "0123456789abcdef" for c in key):
                raise ConfigError(f"gateway.{name}: each entry is the SHA-256 hex digest of a key")
    for origin in settings.allowed_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ConfigError(
                f"gateway.allowed_origins: {origin!r} is neither * nor such as https://chat.example"
            )
    last = settings.count - 1
    for key, port in (("port", settings.port), ("admin_port", settings.admin_port)):
        if port > 0 and port + last > 65535:
            raise ConfigError(f"gateway.{key}: {port} + {last} further ones exceed 65535")
    if settings.admin_port >= 0 and not settings.admin_keys:
        raise ConfigError("gateway.admin_keys: the admin port needs at least one")


def _check_addresses(config: Config) -> None:
    """Links go where they may go, and nothing binds beyond this machine without keys."""
    addresses = {
        "tokenizer.address": config.tokenizer.address,
        "router.address": config.router.address,
        "scheduler.address": config.scheduler.address,
        "kvstore.address": config.kvstore.address,
    }
    for key, address in addresses.items():
        try:
            if address:
                numbered = address.replace("{index}", "0")
                check_address(numbered, encrypted=bool(config.links.keys))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    bind = config.links.bind
    if bind and not re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", bind):
        raise ConfigError(f"links.bind: {bind!r} is not an IP such as 0.0.0.0")
