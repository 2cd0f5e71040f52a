"""Versions of packages, also of those that are on the path but not installed."""

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"


def version_of(package: str = "jdag") -> str:
    """The version of a package; `UNKNOWN` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # From a checkout.
        return UNKNOWN
