"""From a TFLite graph to the drafter's roles: :func:`walk` over :func:`flatten`."""
