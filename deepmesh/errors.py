"""What a command or a library call says when it cannot do its work."""


class UserError(Exception):
    """Something that the user can act on; the text says what is wrong and what to do."""
