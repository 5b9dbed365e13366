"""`deepmesh keys`: an API key for clients, and what the gateway stores of it."""

import hashlib
import secrets


def keys() -> None:
    """Make an API key, and its digest for gateway.api_keys of mesh.toml."""
    key = f"dm-{secrets.token_urlsafe(32)}"
    print(f"key (give it to the client, it is stored nowhere):  {key}")
    print("mesh.toml, [gateway]:")
    print(f'api_keys = ["{hashlib.sha256(key.encode()).hexdigest()}"]')
