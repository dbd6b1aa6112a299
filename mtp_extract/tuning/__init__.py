"""Fitting a drafter to its base: training it, or making a head, on what the base writes."""
