"""Every record of options, each checked where it is made."""
