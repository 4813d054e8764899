"""Options of training, each declared once, with its type, default, help text, and which values are allowed.

A module is a subject. In it, the options that the same commands take are a class, under whose docstring `--help` lists
them, and `LIMITS` says what their values must be. The commands' own options (train/options/commands.py) and the
configuration of a run (train/config.py) are made of these classes.
"""
