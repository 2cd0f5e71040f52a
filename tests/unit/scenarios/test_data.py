"""The data that scenarios read is the data that its README describes."""

import hashlib

import numpy as np

from tests import ROOT

DIGITS = ROOT / "scenarios" / "data" / "digits.npz"
SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
BYTES_MAX = 150_000


def test_digits_are_the_source_to_the_bit():
    with np.load(DIGITS, allow_pickle=False) as arrays:
        assert sorted(arrays) == ["images", "labels"]
        images, labels = arrays["images"], arrays["labels"]
    assert images.shape == (1797, 8, 8) and labels.shape == (1797,)
    assert images.dtype == labels.dtype == np.uint8
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest == SHA256
    assert DIGITS.stat().st_size < BYTES_MAX
