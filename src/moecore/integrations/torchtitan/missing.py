"""What to install when an import of torchtitan fails."""

from __future__ import annotations


def import_error(error: ModuleNotFoundError, other_version: str) -> ImportError:
    """Return the error to raise: torchtitan imports triton, which CPU builds of torch lack.

    Args:
        error: of an import from torchtitan.
        other_version: what to say where another version of torchtitan is installed, or none.
    """
    if (error.name or "").partition(".")[0] == "triton":
        return ImportError(
            "triton (None) must be installed for torchtitan, which imports it; CPU builds of torch "
            "lack it: pip install 'triton>=3.6'"
        )
    return ImportError(other_version)
