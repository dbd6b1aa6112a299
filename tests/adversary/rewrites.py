"""Other ways of writing the same function."""
from adversary.edits import Case

REWRITES: tuple[Case, ...] = ()
