"""`uniforms` against published vectors, and against Philox and the conversion to floats written out with Python's integers."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.sampling.philox import STREAM, philox, to_unit
from nanovllm.ops.sampling.uniforms import uniforms

WORD = 0xFFFFFFFF
seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31 - 1)


def scalar_philox(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & WORD, (a >> 32) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def scalar_unit(word):
    return (word + Fraction(1, 2)) / 2**32 if word < 2**23 else ((word >> 9) + Fraction(1, 2)) / 2**23


def scalar_uniform(seed, position, i):
    counter = (i // 4, STREAM, position & WORD, position >> 32)
    return scalar_unit(scalar_philox(counter, (seed & WORD, seed >> 32))[i % 4])


# Random123's kat_vectors, "philox4x32 10": counter, key, output
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    def words(text):
        return tuple(int(w, 16) for w in text.split())

    assert scalar_philox(words(counter), words(key)) == words(expected)
    found = philox(tuple(map(torch.tensor, words(counter))), tuple(map(torch.tensor, words(key))))
    assert tuple(map(int, found)) == words(expected)


@given(seed=seeds, position=st.one_of(positions, st.integers(0, 2**63 - 1)), num=st.integers(0, 11))
@settings(deadline=None)
def test_equals_the_scalar_form(seed, position, num):
    found = uniforms(torch.tensor([[seed, position]]), num)
    assert found.shape == (1, num) and found.dtype == torch.float32
    assert [Fraction(u) for u in found[0].tolist()] == [scalar_uniform(seed, position, i) for i in range(num)]


def test_words_to_floats_are_exact_and_open():
    words = [0, 1, 2, 511, 512, 2**23 - 1, 2**23, 2**23 + 511, 2**23 + 512, 2**31, 2**32 - 512, 2**32 - 1]
    units = to_unit(torch.tensor(words)).tolist()
    assert [Fraction(u) for u in units] == [scalar_unit(w) for w in words]
    assert units == sorted(units) and units[0] > 0 and units[-1] < 1


@given(keys=st.lists(st.tuples(seeds, positions), min_size=1, max_size=9), num=st.integers(1, 70), more=st.integers(0, 9))
@settings(deadline=None)
def test_a_row_depends_on_its_key_alone_and_not_on_how_many_numbers(keys, num, more):
    together = uniforms(torch.tensor(keys), num + more)
    for row, key in enumerate(keys):
        assert torch.equal(uniforms(torch.tensor([key]), num)[0], together[row, :num])


def test_keys_give_different_numbers():
    keys = [(0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**32), (2**31, 0), (0, 2**31), (2**62, 5), (5, 2**62)]
    rows = uniforms(torch.tensor(keys), 64)
    same = (rows.unsqueeze(0) == rows.unsqueeze(1)).sum(-1)
    assert same.fill_diagonal_(0).max() <= 1


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_uniform_along_each_axis(axis):
    """Chi-square with 255 degrees of freedom and a lag-1 correlation; the numbers are fixed, so the test cannot flicker."""
    n = 2**16
    index, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    if axis == "token":
        u = uniforms(torch.tensor([[7, 9]]), n)[0]
    else:
        u = uniforms(torch.stack((zero, index) if axis == "position" else (index, zero), 1), 1)[:, 0]
    u = u.double()
    observed = torch.bincount((u * 256).long(), minlength=256).double()
    chi2 = ((observed - n / 256) ** 2 / (n / 256)).sum()
    assert 175 < chi2 < 347  # 1e-4 either side
    lag = torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]
    assert abs(lag) < 4 / n**0.5


def test_the_finest_numbers_are_reached():
    u = uniforms(torch.tensor([[3, 4]]), 2**20)
    assert u.min() < 2**-18 and 1 - u.max() < 2**-18
    assert u.unique().numel() > 0.9 * 2**20


@pytest.mark.parametrize("num", [0, 1, 6])
def test_opcheck(num):
    torch.library.opcheck(torch.ops.nanovllm.uniforms.default, (torch.tensor([[1, 2], [3, 4]]), num))


@pytest.mark.interpret
@pytest.mark.parametrize("num", [0, 1, 3, 2047, 2048, 2049, 4099])
def test_the_kernel_interpreted(num):
    """Numbers on either side of the 2,048 of a program."""
    from nanovllm.ops.sampling import triton_sampling

    keys = torch.tensor([[0, 0], [2**63 - 1, 2**31 - 1], [12345678901234, 77], [5, 2**40]])
    for some in (keys, keys[1:2], keys.t().contiguous().t()):
        assert torch.equal(triton_sampling.launch_uniforms(some, num), uniforms(some, num))
