"""`deepmesh check determinism`: the same requests under all that must not change their tokens."""
