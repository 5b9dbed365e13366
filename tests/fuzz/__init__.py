"""Fuzz targets, functions of bytes: `make fuzz` drives them by coverage, CI by Hypothesis."""
