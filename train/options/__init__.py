"""Options of training. Each is declared once, with its type, default, help text and allowed values.

Each module covers a subject. A class in it holds the options that a set of commands shares; its docstring is their
heading in `--help`. `LIMITS` holds their allowed values. The commands' own options (train/options/commands.py) and the
configuration of a run (train/config.py) are composed of these classes.
"""
