"""mesh.toml -> one frozen struct per service, checked; errors name the key's path."""

import hashlib
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Literal, cast

import msgspec

from deepmesh.addresses import check_address, is_name
from deepmesh.config_words import words

MIN_DISK_BYTES = 16 << 20
_ROOT = Path(__file__).resolve().parents[1]
SHIPPED_MODEL = _ROOT / "models/tiny"


Role = Literal["prefill", "decode", "both"]


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
    log_format: Literal["text", "json"] = "text"  # json: one object a line, with trace ids


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
    api_keys_file: str = ""  # further digests, one a line: a secret of a container engine
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
    policy: Literal["aware", "round-robin"] = "aware"  # of caches and loads; to compare: of nothing
    address: str = ""  # set: an external one, used whatever `count` says; `up` starts none


class SchedulerConfig(Section, frozen=True):
    """[scheduler]: one process per EP group."""

    count: int = 1  # replicas
    roles: list[Role] = []  # of each: prefill (for others), decode, both; empty: all do both
    address: str = ""
    depth: Literal[1, 2, 3] = 2
    max_rows: int = 64  # requests resident at once
    max_waiting: int = 4096
    step_tokens: int = 1024  # tokens a step may compute
    chunk_tokens: int = 512  # whole multiples of the executor's chunk_align
    hold_steps: int = 1  # that a lone prefill waits for other ranks, unless prefill_share binds
    decode_itl_ms: float = 100.0  # between tokens of one request, while others prefill
    prefill_share: float = 0.1  # of a step with decode rows, where its costs are known; 1: no bound
    # A prompt's chunk is computed by all ranks of a group if each gets so many tokens; 0: never.
    context_parallel_tokens: int = 256
    max_model_len: int = 0  # 0: what the executor can hold
    orphan_s: float = 10.0
    deadline_s: float = 120.0
    hang_s: float = 10.0  # a step without a result for so long, and for 10 slow steps, hangs
    audit: bool = False  # check all invariants after every event
    prefix_cache: bool = True
    store_lookup_s: float = 0.05  # a request waits so long for what a kvstore says of its prompt
    store_load_s: float = 2.0  # and so long for its blocks; then it computes them
    handover_wait_s: float = 30.0  # a decode group waits so long for a prompt; then computes it
    handover_ttl_s: float = 10.0  # a prefill group keeps it so long without a sign of life
    # Of a group of several ranks: routed experts are placed anew by their load.
    experts_interval_s: float = 0.0  # between two plans; 0: experts stay where they are
    experts_record_steps: int = 64  # group steps whose rows are counted together
    draft_costs_s: float = 86_400.0  # what was learned of drafts outlives a start for so long
    experts_window: int = 64  # records that a plan looks at, at most
    experts_ridge_rows: int = 64  # rows of an expert that take as long as to read it; 0: only rows


class ExecutorConfig(Section, frozen=True):
    """[executor]: one process per device."""

    kind: Literal["model", "fake"] = "model"
    device: Literal["cpu", "cuda", "host"] = "cpu"  # "host": what a GPU runs, on the CPU; for tests
    ranks: int = 1
    address: str = ""
    threads: int = 1
    numerics: Literal["exact", "fp32", "bf16"] = "bf16"
    # positions of a prompt that run the upper layers: those that its bits depend on; "bounded": the
    # last window alone, which is lossy; "full": all
    prefill_tail: Literal["exact", "bounded", "full"] = "exact"
    redundant_experts: int = 0  # copies of experts of a layer beside one of each, over all ranks
    global_blocks: int = 0  # 0: by memory, see `deepmesh model inspect`
    window_blocks: int = 0
    slots: int = 0  # 0: scheduler.max_rows + room for fences
    max_queued: int = 64  # steps that may wait for the device; a scheduler sends `depth` of them
    draft_tokens: int = 0  # that each step may verify with a request's next token; 0: none
    # "adaptive": as many as pay, by what steps take; "always": all of them in every step
    draft_policy: Literal["adaptive", "always"] = "adaptive"
    # "coupled": the tokens that there would be without drafts; "rejection": the right distribution,
    # but equal requests give unequal texts
    draft_acceptance: Literal["coupled", "rejection"] = "coupled"
    # What the device can do at most, for MFU and the share of its memory's bandwidth: TFLOP/s and
    # GB/s; 0: by its name (GPU), or measured when the weights are there (CPU)
    peak_tflops: float = 0.0
    peak_gbps: float = 0.0
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

    # Groups with other roles than "both": prompts go from executor to executor.
    handover: Literal["host", "device"] = "host"  # prompts go through memory of either (0031)
    handover_bytes: int = 1 << 30  # of that memory, for prompts on their way, of each executor
    # Where executors listen for those of decode groups. Empty: ipc in the run folder; tcp://HOST:PORT
    # with {index} (of the scheduler) and {rank}.
    handover_address: str = ""


class TelemetryConfig(Section, frozen=True):
    """[telemetry]: traces. The standard OTEL_EXPORTER_OTLP_* variables add an exporter."""

    enabled: bool = True
    file: bool = True  # JSON lines in RUN_DIR/traces
    sample_ratio: float = 1.0  # of requests that bring no traceparent of their own
    slow_s: float = 30.0  # requests that take so long are traced whatever the ratio; 0: are not


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
    ttl_s: float = 0.0  # blocks and points that nobody used for so long leave; 0: only for room
    redis_url: str = ""  # shared tier: redis://[user:password@]host:port/db, rediss:// or unix://
    redis_max_bytes: int = 1 << 30  # of all kvstores that share it together; records extra
    redis_ttl_s: float = 86_400.0  # of blocks and points there, from their last use on
    redis_prefix: str = "deepmesh"  # of all keys: kvstores with the same one share what is there


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

    @property
    def finds_tokenizers(self) -> bool:
        """Whether there is a tokenizer at every address that the name in tokenizer.address has."""
        return "{index}" not in self.tokenizer.address and is_name(self.tokenizer.address)

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

    def role(self, index: int) -> Role:
        """What scheduler `index` is for."""
        return self.scheduler.roles[index] if self.scheduler.roles else "both"

    def group_address(self, index: int) -> str:
        """Where the executors of scheduler `index` meet: tcp://HOST:PORT, or a path's beginning."""
        external = self.executor.group_address.replace("{index}", str(index))
        return external or f"{self.mesh.run_dir}/group-{index}"

    @property
    def is_split(self) -> bool:
        """Whether prompts are computed by other groups than answers."""
        return any(role != "both" for role in self.scheduler.roles)

    def prefillers(self, index: int) -> list[int]:
        """The schedulers that compute prompts for scheduler `index`."""
        if not self.is_split or self.role(index) == "prefill":
            return []
        others = (i for i in range(self.scheduler.count) if i != index)
        return [i for i in others if self.role(i) != "decode"]

    def handover_address(self, index: int, rank: int) -> str:
        """Where the executor `rank` of scheduler `index` listens for those that pull from it."""
        external = self.executor.handover_address.replace("{index}", str(index))
        name = f"handover-{index}-{rank}"
        return external.replace("{rank}", str(rank)) or self._ipc(name)

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
        if self.is_split:
            groups = [i for i in range(self.scheduler.count) if self.role(i) != "decode"]
            ranks = range(self.executor.ranks)
            found |= {self.handover_address(i, r): "executor" for i in groups for r in ranks}
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
        except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
            raise ConfigError(f"{path}: {error}") from error
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {words(str(error), Config)}") from error
    _check_texts(msgspec.to_builtins(config))
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


def _check_texts(value: object, name: str = "") -> None:
    """Texts become paths, addresses and arguments: none of these has a NUL."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}: a NUL character")
    if isinstance(value, dict):
        for key, each in cast(dict[str, object], value).items():
            _check_texts(each, f"{name}.{key}" if name else key)
    if isinstance(value, list):
        for at, each in enumerate(cast(list[object], value)):
            _check_texts(each, f"{name}[{at}]")


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
        "scheduler.experts_interval_s": (config.scheduler.experts_interval_s, 0, 86_400),
        "scheduler.experts_record_steps": (config.scheduler.experts_record_steps, 1, 1 << 20),
        "scheduler.experts_window": (config.scheduler.experts_window, 1, 4096),
        "scheduler.experts_ridge_rows": (config.scheduler.experts_ridge_rows, 0, 1 << 16),
        "executor.redundant_experts": (config.executor.redundant_experts, 0, 1 << 16),
        "scheduler.max_waiting": (config.scheduler.max_waiting, 1, 1 << 20),
        "scheduler.hold_steps": (config.scheduler.hold_steps, 0, 1000),
        "scheduler.decode_itl_ms": (config.scheduler.decode_itl_ms, 0, 3_600_000),
        "scheduler.prefill_share": (config.scheduler.prefill_share, 0, 1),
        "scheduler.context_parallel_tokens": (
            config.scheduler.context_parallel_tokens,
            0,
            1 << 20,
        ),
        "scheduler.max_model_len": (config.scheduler.max_model_len, 0, 1 << 30),
        "scheduler.orphan_s": (config.scheduler.orphan_s, 0, 86_400),
        "scheduler.store_lookup_s": (config.scheduler.store_lookup_s, 0.001, 60),
        "scheduler.store_load_s": (config.scheduler.store_load_s, 0.01, 3600),
        "scheduler.handover_wait_s": (config.scheduler.handover_wait_s, 0.01, 86_400),
        "scheduler.handover_ttl_s": (config.scheduler.handover_ttl_s, 0.1, 3600),
        "executor.handover_bytes": (config.executor.handover_bytes, 1 << 20, 1 << 46),
        "scheduler.draft_costs_s": (config.scheduler.draft_costs_s, 0, 1e9),
        "scheduler.hang_s": (config.scheduler.hang_s, 0.1, 86_400),
        "scheduler.deadline_s": (config.scheduler.deadline_s, 0.1, 86_400),
        "executor.global_blocks": (config.executor.global_blocks, 0, 1 << 30),
        "executor.window_blocks": (config.executor.window_blocks, 0, 1 << 30),
        "executor.slots": (config.executor.slots, 0, 1 << 16),
        "executor.max_queued": (config.executor.max_queued, 3, 1 << 20),
        "executor.draft_tokens": (config.executor.draft_tokens, 0, 15),
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
        "kvstore.ttl_s": (config.kvstore.ttl_s, 0, 366 * 86_400),
        "kvstore.redis_max_bytes": (config.kvstore.redis_max_bytes, 1 << 20, 1 << 46),
        "kvstore.redis_ttl_s": (config.kvstore.redis_ttl_s, 1, 366 * 86_400),
        "telemetry.sample_ratio": (config.telemetry.sample_ratio, 0.0, 1.0),
    }
    for key, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"{key}: {value} is not between {low} and {high}")
    if 0 < config.kvstore.disk_bytes < MIN_DISK_BYTES:
        raise ConfigError(f"kvstore.disk_bytes: use 0 (off) or at least {MIN_DISK_BYTES}")
    redis_url = config.kvstore.redis_url
    if redis_url and not re.match(r"(rediss?://[^\s/]|unix:///)", redis_url):
        raise ConfigError(
            "kvstore.redis_url: neither redis://HOST:PORT/DB nor rediss://… nor unix:///PATH"
        )
    if not re.fullmatch(r"[\w.-]{1,64}", config.kvstore.redis_prefix):
        raise ConfigError("kvstore.redis_prefix: 1 to 64 letters, digits, '.', '_' or '-'")
    group_address = config.executor.group_address
    if group_address and not re.fullmatch(r"tcp://[^/:\s]+:(\d+|\{index\})+", group_address):
        raise ConfigError(f"executor.group_address: {group_address!r} is not tcp://HOST:PORT")
    if group_address and config.scheduler.count > 1 and "{index}" not in group_address:
        raise ConfigError("executor.group_address: with several schedulers it needs an {index}")
    _check_roles(config)
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


def _check_roles(config: Config) -> None:
    """Every role is played, and somebody chooses who plays it for a request."""
    roles, count = config.scheduler.roles, config.scheduler.count
    if not roles or (set(roles) == {"both"} and len(roles) == count):
        return
    if len(roles) != count:
        raise ConfigError(f"scheduler.roles: {len(roles)} roles for {count} schedulers")
    if not config.router_address:
        raise ConfigError('scheduler.roles: roles other than "both" need a router')
    for needed in ("prefill", "decode"):
        if needed not in roles and "both" not in roles:
            raise ConfigError(f'scheduler.roles: at least one must be "{needed}" or "both"')
    if not config.scheduler.prefix_cache:
        raise ConfigError("scheduler.roles: prompts are handed over through the prefix cache")
    address = config.executor.handover_address
    if address and (count > 1 and "{index}" not in address):
        raise ConfigError("executor.handover_address: with several schedulers it needs an {index}")
    if address and (config.executor.ranks > 1 and "{rank}" not in address):
        raise ConfigError("executor.handover_address: with several ranks it needs a {rank}")


def _check_addresses(config: Config) -> None:
    """Links go where they may go, and nothing binds beyond this machine without keys."""
    addresses = {
        "tokenizer.address": config.tokenizer.address,
        "router.address": config.router.address,
        "scheduler.address": config.scheduler.address,
        "kvstore.address": config.kvstore.address,
        "executor.handover_address": config.executor.handover_address,
    }
    for key, address in addresses.items():
        try:
            if address:
                numbered = address.replace("{index}", "0").replace("{rank}", "0")
                check_address(numbered, encrypted=bool(config.links.keys))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    bind = config.links.bind
    if bind and not re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", bind):
        raise ConfigError(f"links.bind: {bind!r} is not an IP such as 0.0.0.0")
