"""What a private deployment keeps to itself: the secret of its cohorts, noise that nobody can draw again, and what was spent.

Clients know the run's seed. Cohorts are drawn from a secret of 256 bits instead, and noise from a new key of the operating
system for each round, both by ChaCha20. The file with the secret also holds the privacy spent. It is written before a model is
sent, and unlike a checkpoint it never goes back: a round that is repeated costs again, and gets another cohort.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from undrift.core.errors import BadRunFolder
from undrift.core.files import replacing, writing
from undrift.core.seals import read_sealed, seal
from undrift.core.streams import normal
from undrift.round.accounting import Accountant
from undrift.round.private import PART


class Ledger:
    """The file of a private deployment, for the server's eyes only; a `Source` of noise and cohorts."""

    def __init__(self, file: Path, resume: bool) -> None:
        self.file, self.spent = file, torch.zeros(0, dtype=torch.float64)
        self.rounds = self.repeated = 0  # all rounds that were written down, and how many of them were repeated since
        if resume:
            if not file.exists():
                raise BadRunFolder(f"{file} is gone, which says what the run has spent; start again with another --out")
            held = read_sealed(file)
            self.secret, self.rounds = bytes.fromhex(held["secret"]), int(held["rounds"])
            self.spent = torch.tensor(held["spent"], dtype=torch.float64)
        else:
            self.secret = secrets.token_bytes(32)
            self.save()

    def save(self) -> None:
        with writing(self.file), replacing(self.file) as temporary:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)
            held = {"secret": self.secret.hex(), "rounds": self.rounds, "spent": self.spent.tolist()}
            temporary.write_bytes(seal(held))

    def write(self, accountant: Accountant) -> None:
        """Write down what was spent after one more round."""
        self.spent, self.rounds = accountant.spent, self.rounds + 1
        self.save()

    def carry_over(self, accountant: Accountant, t: int) -> None:
        """Let a run that goes on at round t go on from what was spent, also where its checkpoint lies before that."""
        if self.rounds < t:
            raise BadRunFolder(
                f"{self.file} knows of {self.rounds} rounds, and the checkpoint of {t}: it is an older copy, whose cohorts "
                "would be drawn again; start again with another --out"
            )
        self.repeated = self.rounds - t
        if len(self.spent):
            accountant.spent = torch.maximum(accountant.spent, self.spent)

    def normal(self, key: Tensor, count: int) -> Tensor:
        stream = key_stream(secrets.token_bytes(32), 0, count + count % 2)
        return torch.cat([normal(words) for words in stream])[:count].expand(*key.shape, count)

    def words(self, t: int, count: int) -> Tensor:
        return torch.cat(list(key_stream(self.secret, t + self.repeated, count)))


def key_stream(key: bytes, number: int, count: int) -> Iterator[Tensor]:
    """Random words: stream `number` of a key of 256 bits, a part at a time."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    nonce = bytes(8) + number.to_bytes(8, "little")  # a counter from 0, and which stream it is
    cipher = Cipher(ChaCha20(key, nonce), mode=None).encryptor()
    for first in range(0, count, PART):
        words = cipher.update(bytes(8 * min(PART, count - first)))
        yield torch.from_numpy(np.frombuffer(words, np.int64).copy())
