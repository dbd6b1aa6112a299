"""``python -m mtp_extract``: as ``mtp``."""

from mtp_extract.cli.main import main

if __name__ == "__main__":
    main("python -m mtp_extract")
