"""The report of `python -m train gpu-report`: a GPU's speed and cost, by the figures that buyers compare.

`figures.py` defines a figure and the file that holds them. `section.py` defines what a section receives. Each section
is a module with one function, `measure`.
"""
