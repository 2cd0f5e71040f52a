"""Figures have the units that their names end with, and few digits."""

import pytest

from jdag.report.formatting import formatted


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("virtual_time_ns", 1_352_036, "1.352 ms"),
        ("virtual_time_ns", 0, "0 ns"),
        ("wire_bytes", 2048, "2 KiB"),
        ("wire_bytes", 12, "12 B"),
        ("messages", 24_932, "24,932"),
        ("test_accuracy", 0.98333, "98.33 %"),
        ("bubble", {"a": 0.5, "b": 1}, "a: 50.00 %, b: 100.00 %"),
        ("bubble_max", 0.272727, "27.27 %"),
        ("gradient_difference", 2.27948e-07, "2.279e-07"),
        ("same_bits_as_clean", True, "yes"),
        ("loss", None, "-"),
        ("owed_workers", ["a", "b"], "a, b"),
        ("error", "WorkerLost", "WorkerLost"),
    ],
)
def test_a_figure_reads_as_people_write_it(name, value, text):
    assert formatted(name, value) == text


def test_a_long_list_says_how_much_more_there_is():
    by_worker = {f"w{number}": 0.25 for number in range(256)}
    assert formatted("bubble", by_worker).endswith("w11: 25.00 %, and 244 more")
