"""The suite; shared helpers are imported as `tests.name`."""
