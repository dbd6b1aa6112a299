"""Parts of ``build_sample.py``: train, export, quantize and package a tiny Gemma 4 pair."""
