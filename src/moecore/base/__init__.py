"""Option records, field checks, torch's private names, saved-tensor packers, and CUDA streams."""

__version__ = "0.2.0"


def get_install_command(extra: str, pip_options: str = "") -> str:
    """Return the pip command that installs an extra of moecore; `pip_options` end in a space."""
    return f"pip install {pip_options}'.[{extra}]' in a clone of moecore"
