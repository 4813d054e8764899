"""Presets: one file each, whose docstring states the command, the hardware, the speed and the accuracy to expect."""
