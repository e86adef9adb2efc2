"""The masks of secure aggregation: they cancel in the sum, hide each addend, and can be taken off when clients leave."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr")

from undrift.deploy import masks
from undrift.deploy.masks import KEY, Fixed, Secrets, add_stream, draw_secrets, join, pair_key, seed_key, split
from undrift.deploy.messages import Refused

CONTEXT, E = "run 0 train", 5000


def masked(own: list[Secrets], numbers: list[Fixed]) -> list[Fixed]:
    public = {place: masks.public_keys(s) for place, s in enumerate(own)}
    sent = [n.copy() for n in numbers]
    for place, s in enumerate(own):
        masks.mask(sent[place], s, place, {p: k for p, k in public.items() if p != place}, CONTEXT)
    return sent


@pytest.mark.parametrize("gone", [(), (4,), (0, 7)])
def test_masks_cancel_in_the_sum_also_when_clients_leave(gone: tuple[int, ...]) -> None:
    own = [draw_secrets() for _ in range(10)]
    numbers = [np.random.default_rng(n).integers(0, 2**32, E, dtype=np.uint32) for n in range(10)]
    sent = masked(own, numbers)
    stay = [n for n in range(10) if n not in gone]
    total = np.add.reduce([sent[n] for n in stay], dtype=np.uint32)
    wanted = np.add.reduce([numbers[n] for n in stay], dtype=np.uint32)
    assert not np.array_equal(total, wanted)
    public = {n: masks.public_keys(own[n]) for n in stay}
    masks.unmask(total, [own[n].seed for n in stay], {n: own[n].mask for n in gone}, public, CONTEXT)
    assert np.array_equal(total, wanted)


def test_what_is_sent_looks_like_noise_and_stays_so_without_every_mask() -> None:
    """All numbers are 7; whoever knows the seed, or all but one of the common keys, still sees noise."""
    own = [draw_secrets() for _ in range(4)]
    sent = masked(own, [np.full(E, 7, np.uint32)] * 4)[0]
    seen = [sent.copy()]
    add_stream(sent, seed_key(own[0].seed, CONTEXT), -1)
    seen.append(sent.copy())
    for other in (1, 2):
        add_stream(sent, pair_key(own[0].mask, masks.public_keys(own[other])[KEY:], CONTEXT, 0, other), -1)
        seen.append(sent.copy())
    for numbers in seen:
        assert stats.kstest(numbers / 2**32, "uniform").pvalue > 1e-4 and len(np.unique(numbers)) > E - 10
    add_stream(sent, pair_key(own[0].mask, masks.public_keys(own[3])[KEY:], CONTEXT, 0, 3), -1)
    assert (sent == 7).all()


def test_masks_of_other_rounds_and_sums_are_others() -> None:
    own, other = draw_secrets(), draw_secrets()
    keys = {
        pair_key(own.mask, masks.public_keys(other)[KEY:], context, *places)
        for context in ("run 0 train", "run 1 train", "run 0 measure", "nur 0 train")
        for places in ((0, 1), (0, 2))
    }
    assert len(keys) == 8
    assert pair_key(own.mask, masks.public_keys(other)[KEY:], CONTEXT, 3, 5) == pair_key(
        other.mask, masks.public_keys(own)[KEY:], CONTEXT, 5, 3
    )


def test_so_many_shares_lead_back_to_a_secret_and_fewer_do_not() -> None:
    secret = secrets.token_bytes(KEY)
    shares = dict(enumerate(split(secret, 4, 6)))
    assert join({p: shares[p] for p in (5, 1, 3, 0)}, 4) == join(shares, 4) == secret
    assert join({p: shares[p] for p in (5, 1, 3)}, 3) != secret
    assert all(secret[:16] != share[:16] for share in shares.values())


def test_numbers_come_back_up_to_half_a_step_each() -> None:
    random = np.random.default_rng(0)
    values = random.uniform(-16, 16, (10, E))
    total = np.add.reduce([masks.to_fixed(v, 16.0, 10) for v in values], dtype=np.uint32)
    apart = np.abs(masks.to_floats(total, 16.0, 10) - values.sum(0))
    assert 0 < apart.max() <= 10 / 2 / masks.scale(16.0, 10) < 1e-6
    ends = np.full((10, 2), [16.0, -16.0])  # the largest sums do not overflow
    total = np.add.reduce([masks.to_fixed(v, 16.0, 10) for v in ends], dtype=np.uint32)
    assert masks.to_floats(total, 16.0, 10).tolist() == [160.0, -160.0]
    for wrong, reason in ((16.1, "larger than secure_bound=16"), (np.nan, "not finite"), (np.inf, "not finite")):
        with pytest.raises(Refused, match=reason):
            masks.to_fixed(np.array([wrong]), 16.0, 10)


def test_shares_are_sealed_for_one_reader_and_keys_must_be_keys() -> None:
    key = secrets.token_bytes(KEY)
    sealed = masks.seal(key, b"x" * 48)
    assert len(sealed) == masks.SEALED and masks.unseal(key, sealed) == b"x" * 48
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), bytes(64)):
        with pytest.raises(Refused, match="not sealed by the client"):
            masks.unseal(key, wrong)
    with pytest.raises(Refused, match="a public key is none"):  # of low order: the result would be known to everybody
        masks.agree(key, bytes(32), "share")


def test_the_stream_is_chacha20_to_the_end() -> None:
    """Against the first words of RFC 8439's zero key; parts join without a gap."""
    numbers = np.zeros(2**21 + 7, np.uint32)
    add_stream(numbers, bytes(32), 1)
    assert numbers[:2].tobytes().hex() == "76b8e0ada0f13d90"
    assert np.count_nonzero(numbers == 0) < 5 and numbers[-1] != 0
