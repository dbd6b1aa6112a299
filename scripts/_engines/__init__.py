"""What ``engines.py`` runs. The ``run_*.py`` need their engine alone, in its own interpreter."""
