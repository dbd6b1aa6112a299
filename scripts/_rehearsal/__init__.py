"""What ``rehearse.py`` is made of: a pair of the real geometry, and commands that are measured.

Its graphs are built by ``tests/helpers/make_graph.py``, as the tests' own are: ``tests`` has to be on the path.
"""
