"""The data that scenarios read is the data that its README describes."""

import hashlib

import numpy as np

from tests import ROOT

DIGITS = ROOT / "scenarios" / "data" / "digits.npz"
SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
BYTES_MAX = 150_000


def load() -> tuple[np.ndarray, np.ndarray]:
    with np.load(DIGITS, allow_pickle=False) as arrays:
        assert sorted(arrays) == ["images", "labels"]
        return arrays["images"], arrays["labels"]


def test_digits_are_1797_images_of_8_by_8_with_a_label_each():
    images, labels = load()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == labels.dtype == np.uint8


def test_digits_are_the_source_to_the_bit():
    images, labels = load()
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest == SHA256


def test_digits_are_a_small_file():
    assert DIGITS.stat().st_size < BYTES_MAX
