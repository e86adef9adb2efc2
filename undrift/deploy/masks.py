"""Masks of secure aggregation: what a client adds to its numbers, so that only the sum of all clients can be read.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   (mod 2^32)

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure Aggregation for Privacy-Preserving
Machine Learning. CCS 2017, Figure 4. s_ij comes from X25519 and HKDF, PRG is ChaCha20, shares are Shamir's and travel under
AES-GCM; all of these are `cryptography`'s and `pycryptodome`'s. Whatever another machine sent, the only failure is `Refused`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.deploy.messages import Refused
from undrift.deploy.privacy import key_stream

LEAST = 3  # clients: the sum of two says to each of them what the other sent
BLOCK = 16  # bytes of a secret that Shamir's scheme takes
KEY, SEED, SEALED, MARK = 32, 16, 64, 32  # bytes of an X25519 key, of b_i, of shares under AES-GCM, of a hash
Bytes = NDArray[np.uint8]
Fixed = NDArray[np.uint32]


def threshold(clients: int) -> int:
    """How many of the clients that gave keys must stay to the end.

    >>> [threshold(n) for n in (3, 4, 5, 10, 20)]
    [3, 3, 4, 7, 14]
    """
    return 2 * clients // 3 + 1


class Secrets(NamedTuple):
    """What one client draws for one sum."""

    cipher: bytes  # its X25519 key for shares on their way
    mask: bytes  # its X25519 key for s_ij; it is shared out, for the case that the client leaves
    seed: bytes  # b_i, shared out for the case that it stays


def draw_secrets() -> Secrets:
    return Secrets(secrets.token_bytes(KEY), secrets.token_bytes(KEY), secrets.token_bytes(SEED))


def public_keys(own: Secrets) -> bytes:
    """Both public keys, one after the other."""
    return public_key(own.cipher) + public_key(own.mask)


def public_key(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """The 256-bit key that two clients have in common for this purpose, and nobody else."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        common = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Refused(f"a public key is none: {error}") from error
    return HKDF(SHA256(), KEY, salt=None, info=f"undrift {purpose}".encode()).derive(common)


def pair_key(private: bytes, public: bytes, context: str, one: int, other: int) -> bytes:
    """The key of PRG(s_ij), the same from both sides."""
    return agree(private, public, f"mask {context} {min(one, other)} {max(one, other)}")


def seed_key(seed: bytes, context: str) -> bytes:
    """The key of PRG(b_i)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY, salt=None, info=f"undrift own mask {context}".encode()).derive(seed)


def mark_of(seed: bytes, context: str) -> bytes:
    """A hash by which the server sees that shares lead back to b_i."""
    return hashlib.sha256(f"undrift mark {context}".encode() + seed).digest()


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt; each key is used once, so that the nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(bytes(12), text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise Refused("a share was not sealed by the client that it is said to come from") from error


def split(secret: bytes, least: int, clients: int) -> list[bytes]:
    """Shares of a secret for so many clients; any `least` of them lead back to it, and fewer say nothing."""
    from Crypto.Protocol.SecretSharing import Shamir

    parts = [Shamir.split(least, clients, secret[at : at + BLOCK], ssss=False) for at in range(0, len(secret), BLOCK)]
    return [b"".join(part[place][1] for part in parts) for place in range(clients)]


def join(shares: Mapping[int, bytes], least: int) -> bytes:
    """The secret from shares by place, counted from 0."""
    from Crypto.Protocol.SecretSharing import Shamir

    chosen = sorted(shares.items())[:least]
    size = len(chosen[0][1])
    return b"".join(
        Shamir.combine([(place + 1, share[at : at + BLOCK]) for place, share in chosen], ssss=False)
        for at in range(0, size, BLOCK)
    )


def add_stream(numbers: Fixed, key: bytes, sign: int) -> None:
    """Add PRG(key) to the numbers, or take it off, mod 2^32."""
    done = 0
    for words in key_stream(key, 0, -(-len(numbers) // 2)):
        stream = words.numpy().view(np.uint32)[: len(numbers) - done]
        part = numbers[done : done + len(stream)]
        (np.add if sign > 0 else np.subtract)(part, stream, out=part)
        done += len(stream)


def scale(bound: float, clients: int) -> float:
    """How many steps of the grid make 1: a power of two, so large that no sum of numbers up to `bound` overflows.

    >>> scale(16.0, 10)
    8388608.0
    """
    return float(2.0 ** math.floor(math.log2((2.0**31 - clients) / (bound * clients))))


def to_fixed(values: NDArray[np.float64], bound: float, clients: int) -> Fixed:
    """Numbers up to `bound` as whole steps of the grid, mod 2^32."""
    if not np.isfinite(values).all():
        raise Refused("the update is not finite")
    if len(values) and np.abs(values).max() > bound:
        raise Refused(f"an entry of the update is larger than secure_bound={bound:g}; raise it, or lower the rate")
    return np.rint(values * scale(bound, clients)).astype(np.int64).astype(np.uint32)


def to_floats(total: Fixed, bound: float, clients: int) -> NDArray[np.float64]:
    """The sum as numbers; `clients` gave keys, whoever is in the sum."""
    return total.view(np.int32) / scale(bound, clients)


def mask(numbers: Fixed, own: Secrets, place: int, peers: Mapping[int, bytes], context: str) -> None:
    """Add the masks of the client at a place; `peers` are the public keys of the others by place."""
    add_stream(numbers, seed_key(own.seed, context), 1)
    for other, public in peers.items():
        add_stream(numbers, pair_key(own.mask, public[KEY:], context, place, other), 1 if other > place else -1)


def unmask(
    total: Fixed, seeds: Sequence[bytes], gone: Mapping[int, bytes], public: Mapping[int, bytes], context: str
) -> None:
    """Take the masks off the sum of the clients `public` by place: their seeds, and what is left of clients `gone`."""
    for seed in seeds:
        add_stream(total, seed_key(seed, context), -1)
    for place, private in gone.items():
        for other, keys in public.items():
            add_stream(total, pair_key(private, keys[KEY:], context, place, other), 1 if place < other else -1)
