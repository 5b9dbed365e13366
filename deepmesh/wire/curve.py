"""Encryption of one socket, and in words what went wrong with a handshake."""

import zmq

from deepmesh.wire.keys import Keyring

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
RETRY_S = 0.5  # libzmq itself gives up after most failed handshakes


def encrypt_listener(socket: "zmq.Socket[bytes]", keys: Keyring, domain: str) -> None:
    """Let in only who speaks CURVE and whom `zap.door` knows under this domain."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)


def encrypt_dialler(socket: "zmq.Socket[bytes]", keys: Keyring, server_key: bytes) -> None:
    """Show our key, and talk only to who has the secret of `server_key`."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)


def listener_words(event: int) -> str:
    """Why a stranger did not get in; empty: `zap.door` has said it."""
    if event & zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "a peer knows another key of ours than the one in use, or does not encrypt"
    if event & zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "a connection ended within the handshake, as one that does not encrypt may"
    return ""


def dialler_words(event: int, *, encrypted: bool) -> str:
    """Why a listener did not let us in."""
    if not encrypted:
        return "it encrypts its links and this side has no links.keys, or it is no mesh process"
    if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "our key is not on its allow-list"
    if event & zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it does not encrypt its links, or is no mesh process"
    return "it has another key than links.keys says, or ended the handshake"
