"""The command line: ``python -m trainer COMMAND``."""
