"""All targets by name."""

from collections.abc import Callable

from tests.fuzz import files, http, services

Target = Callable[[bytes], None]

TARGETS: dict[str, Target] = {
    "wire": http.wire,
    "bodies": http.bodies,
    "grammars": http.grammars,
    "gateway": services.gateway,
    "tokenizer": services.tokenizer,
    "router": services.router,
    "scheduler": services.scheduler,
    "executor": services.executor,
    "kvstore": services.kvstore,
    "kvstore_disk": files.kvstore_disk,
    "stored_on_disk": files.stored_on_disk,
    "redis_values": files.redis_values,
    "mesh_toml": files.mesh_toml,
    "key_file": files.key_file,
    "checkpoint": files.checkpoint,
    "run_files": files.run_files,
}
