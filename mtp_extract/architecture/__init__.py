"""What a drafter is, as data: its shape (:mod:`.config`) and the roles its weights play (:mod:`.roles`).

Nothing here reads a file or computes. The graph finds these facts, formats write and read them, the network runs them.
"""
