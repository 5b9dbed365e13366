"""Fingerprints of engines: WEIGHTS.ENGINE, both opaque; see `Capacity.fingerprint`."""


def weights_of(fingerprint: str) -> str:
    """The part that names the weights: what two engines must share to continue one answer."""
    return fingerprint.partition(".")[0]
