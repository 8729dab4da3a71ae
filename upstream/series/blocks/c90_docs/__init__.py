"""A page of documentation; the pages there are, and the list of server arguments, are not in the wheel."""

from upstream.edit import Edit

MESSAGE = """
[Docs] Describe --dcp-block-size

What the block size changes, how to choose one, what it needs, and how
to see that it is in use. The table of server arguments wants a row for
the flag; its text is the flag's help.
"""

EDITS: tuple[Edit, ...] = ()
