"""The commands: one file each, and :mod:`mtp_extract.cli.render`, the one module that prints."""
