"""The commands: one file each, which prints its own result through :mod:`mtp_extract.cli.terminal`."""
