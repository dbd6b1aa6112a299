"""What ``rehearse.py`` is made of: a pair of the real geometry, and commands that are measured."""
