"""What several tests use: makers of files, a loopback Hub, bounds."""
