"""Flux: the module that is trained (``model``, needs torch) and what a file holds (``variants``, does not)."""
