"""The ground: records of options, field checks, private names of torch, saved tensors, streams."""

__version__ = "0.2.0"


def install_command(extra: str, options: str = "") -> str:
    """Return the command that installs an extra of moecore, which error messages name."""
    return f"pip install {options}'.[{extra}]' in a clone of moecore"
