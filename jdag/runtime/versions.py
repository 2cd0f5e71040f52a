"""Versions of packages, including checkouts that are not installed."""

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"


def version_of(package: str = "jdag") -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # A checkout that is only on the path.
        return UNKNOWN
